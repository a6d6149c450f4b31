"""Steps made by hand, and all the steps of a committed trace."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np

from omnisim.trace.model import Geometry, NewRequest, Step

TRACES = Path(__file__).parents[2] / "traces"
CONTRADICTS_ITSELF = TRACES / "defects" / "slots-that-lag-behind-the-blocks.yaml"
COMMITTED = sorted({*TRACES.rglob("*.yaml"), *TRACES.rglob("*.jsonl.zst")} - {CONTRADICTS_ITSELF})

Row = tuple[int, ...]
Batch = dict[str, tuple[int, int, Row]]
"""Request id to computed tokens, scheduled tokens, blocks; in batch order."""


def make_step(
    batch: Batch,
    *,
    block_size: int = 4,
    new: tuple[str, ...] = (),
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
    index: int = 0,
) -> Step:
    """A step in which these requests run; its slots follow from the blocks."""
    computed, scheduled, rows = zip(*batch.values(), strict=True) if batch else ((), (), ())
    slots = [
        row[position // block_size] * block_size + position % block_size
        for start, count, row in batch.values()
        for position in range(start, start + count)
    ]
    return Step(
        index=index,
        req_ids=tuple(batch),
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        query_start_loc=(0, *accumulate(scheduled)),
        block_table=rows,
        slot_mapping=np.array(slots, dtype=np.int64),
        num_tokens_padded=sum(scheduled),
        num_prompt_tokens=tuple(start + count for start, count, _ in batch.values()),
        scheduled_new_reqs=tuple(NewRequest(req_id=req_id) for req_id in new),
        resumed_req_ids=resumed,
        preempted_req_ids=(),
        finished_req_ids=finished,
        new_token_ids=(),
        scheduled_spec_decode_tokens={},
        absent_keys=(),
    )


GEOMETRY = Geometry(num_blocks=1000, block_size=4)

STORY = {
    "two enter": make_step({"a": (0, 4, (1,)), "b": (0, 6, (2, 3))}, new=("a", "b")),
    "a new block": make_step({"a": (4, 1, (1, 4)), "b": (6, 1, (2, 3))}),
    "the first is not scheduled": make_step({"b": (7, 1, (2, 3))}),
    "it returns, behind the other": make_step({"b": (8, 1, (2, 3, 5)), "a": (5, 1, (1, 4))}),
    "another order": make_step({"a": (6, 1, (1, 4)), "c": (4, 2, (1, 6)), "b": (9, 1, (2, 3, 5))}, new=("c",)),
    "a hole in the middle": make_step({"a": (7, 1, (1, 4)), "b": (10, 1, (2, 3, 5))}, finished=("c",)),
    "preempted and resumed at once": make_step({"a": (8, 1, (1, 4, 7)), "b": (0, 3, (8,))}, resumed=("b",)),
    "an id is used again": make_step({"b": (3, 1, (8,)), "a": (0, 2, (9,))}, finished=("a",), new=("a",)),
    "a window slides": make_step({"b": (4, 1, (0, 10)), "a": (2, 1, (9,))}),
    "nobody": make_step({}, finished=("a", "b")),
    "many": make_step({f"r{i}": (0, 1, (i,)) for i in range(150)}, new=tuple(f"r{i}" for i in range(150))),
    "a long row": make_step({"r7": (0, 1, (7,)), "r9": (1, 1200, (9, *range(200, 500)))}),
    "a short row in its place": make_step({"r9": (0, 1, (11,)), "r7": (1, 1, (7,))}, resumed=("r9",)),
}
