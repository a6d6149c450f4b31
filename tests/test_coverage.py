"""Each state of a schedule has stories that reach it and near misses that do not; a slow reference counts them too."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnisim import coverage as room
from omnisim.coverage import STATES, Coverage, Seen, Watcher, cover
from omnisim.errors import FileError, IllegalSchedule, SetupError
from omnisim.rows.naming import ProvenanceNames
from omnisim.trace import Geometry, Header, NewRequest, Producer, Step, StepRecord, Trace, load
from omnisim.trace.redact import redact
from omnisim.trace.story import story_trace
from omnisim.truth import Truth

from .trace import schedules

ROOT = Path(__file__).parents[1]
RECORDED = sorted((ROOT / "traces" / "recorded").glob("*.jsonl.zst"))
KERNEL: dict[str, Any] = {"block_size": 8, "kernel_block_size": 4}


def reaches(story: str, state: str, **geometry: Any) -> int:
    """How often a story, whose blocks hold 4 tokens, reaches a state."""
    assert state in STATES
    return cover(story_trace(story, **geometry)).times(state)


def many(num_requests: int) -> str:
    return "; ".join(f"new r{at} [{1 + at}]" for at in range(num_requests))


def long_hit(num_blocks: int) -> str:
    blocks = ",".join(map(str, range(1, num_blocks + 1)))
    return f"new A n={4 * num_blocks} [{blocks}] / fin A; new B c={4 * num_blocks} n=1 [{blocks},200]"


REACH: dict[str, tuple[str, ...]] = {
    "cold": ("new A n=4 [1]", "new A n=8 [1,2] / replace A n=8 [3,4]"),
    "hit-one-block": ("new A n=8 [1,2] / fin A; new B c=4 n=2 [1,3]",),
    "hit-many-blocks": ("new A n=8 [1,2] / fin A; new B c=8 n=2 [1,2,3]", long_hit(101)),
    "hit-over-100-blocks": (long_hit(101),),
    "hit-inside-a-block": ("new A n=8 [1,2] / new B c=7 n=2 [1,2,3]", "new A n=8 [1,2] / new B c=2 n=2 [1]"),
    "full-prompt-hit": ("new A n=8 [1,2] / fin A; new B c=4 n=4 [1,3]",),
    "all-whole-blocks-hit": ("new A n=8 [1,2] / fin A; new B c=8 n=2 [1,2,3]",),
    "prompt-within-a-block": ("new A n=3 [1]", "new A n=1 [1]"),
    "prompt-of-one-block": ("new A n=4 [1]", "new A n=2 [1] p=4 / run A c=2 n=2"),
    "one-token-past-a-block": ("new A n=5 [1,2]", "new A n=9 [1,2,3]"),
    "same-step-hit": (
        "new Z n=4 [1] / fin Z; new A n=8 [1,2]; new B c=4 n=3 [1,3]",
        "new Z n=4 [1] / fin Z; new B c=4 n=3 [1,3]; new A n=8 [1,2]",
    ),
    "same-step-hit-reader-first": ("new Z n=4 [1] / fin Z; new B c=4 n=3 [1,3]; new A n=8 [1,2]",),
    "hit-one-step-later": (
        "new A n=4 [1] / new B c=4 n=2 [1,3]",
        "new A n=4 [1] / fin A; new B c=4 n=2 [1,3]",
        "new A n=3 [1] / run A / new B c=4 n=2 [1,3]",
    ),
    "hit-on-running-owner": (
        "new A n=4 [1] / new B c=4 n=2 [1,3]",
        "new A n=4 [1] / run A [1,2]; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A / resume A n=5 [6,7]; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A; resume A n=5 [6,7]; new B c=4 n=2 [1,3]",
    ),
    "hit-on-preempted-owner": (
        "new A n=4 [1] / preempt A; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A / resume A n=5 [6,7] / preempt A; new B c=4 n=2 [1,3]",
    ),
    "hit-on-finished-owner": (
        "new A n=4 [1] / fin A; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A / fin A; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / fin A; new A c=4 n=2 [1,3]",
        "new A n=8 [1,2] / replace A n=8 [3,4]; new B c=8 n=1 [1,2,5]",
        "new A n=4 [1] / replace A c=4 n=2 [1,3]",
    ),
    "hit-on-several-owners": (
        "new A n=4 [1] / new B c=4 n=4 [1,2] / new C c=8 n=1 [1,2,3]",
        "new A n=4 [1] / fin A; new A c=4 n=4 [1,2] / new C c=8 n=1 [1,2,3]",
    ),
    "hit-on-decoded-rows": (
        "new A n=3 [1] / run A / fin A; new B c=4 n=2 [1,2]",
        "new A n=3 [1] / run A / preempt A / resume A n=5 [4,5] / fin A; new B c=4 n=1 [4,6]",
        "new A n=3 [1] / run A; new B c=4 n=2 [1,2]",
    ),
    "hit-on-unknown-rows": ("new B c=4 n=1 [5,3]", "new A n=4 [1] / fin A; new B c=8 n=1 [0,1,2]"),
    "block-shared": (
        "new A n=4 [1] / run A [1,2]; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / new B c=4 n=2 [1,3] / run A [1,2] / run A; run B",
        "new A n=4 [1] / new B c=4 n=2 [1,3]; new C c=4 n=2 [1,4]",
    ),
    "evicted-and-reused": (
        "new A n=4 [1] / fin A; new B n=4 [1]",
        "new A n=4 [1] / fin A; new A n=4 [1]",
        "new A n=4 [1] / preempt A; new B n=4 [1]",
        "new A n=4 [1] / preempt A / resume A n=5 [6,7] / run A; new B n=4 [1]",
        "new A n=4 [1] / replace A n=4 [2]; new B n=4 [1]",
    ),
    "block-filled-by-decode": ("new A n=3 [1] / run A", "new A n=2 [1] / run A n=3 [1,2] drafts=2"),
    "pad-slot": ("new A n=4 [1]; slots [4,5,6,-1]",),
    "chunked-prefill": ("new A n=4 [1] / run A n=4 [1,2]", "new A n=2 [1] / new B n=1 [2] / run A n=2"),
    "chunked-hit": ("new A n=4 [1] / new B c=4 n=2 [1,3] / run B n=2",),
    "mixed-step": ("new A n=4 [1] / run A [1,2]; new B n=4 [3]",),
    "preempted": ("new A n=4 [1] / preempt A", "new A n=4 [1] / preempt A; resume A n=5 [2,3]"),
    "preempted-mid-prefill": ("new A n=4 [1] p=8 / preempt A",),
    "resumed-cold": ("new A n=4 [1] / preempt A / resume A n=5 [2,3]",),
    "resumed-with-hit": ("new A n=4 [1] / preempt A / resume A c=4 n=1 [1,3]",),
    "resumed-on-others-rows": ("new A n=4 [1] / preempt A; new B n=4 [2] / resume A c=4 n=1 [2,3]",),
    "resumed-at-once": ("new A n=4 [1] / preempt A; resume A n=5 [2,3]",),
    "replaced": ("new A n=4 [1] / replace A n=4 [2]",),
    "replaced-with-hit": ("new A n=4 [1] / replace A c=4 n=2 [1,2]",),
    "ended-mid-prefill": (
        "new A n=4 [1] p=8 / fin A",
        "new A n=4 [1] p=9 / run A n=4 [1,2] / fin A",
        "new A n=4 [1] p=8 / preempt A / fin A",
        "new A n=4 [1] p=8 / run A n=4 [1,2] / preempt A / resume A n=4 [3] / fin A",
    ),
    "ended-while-preempted": ("new A n=4 [1] / preempt A / fin A",),
    "ended-unseen": ("new A n=4 [1] / fin X",),
    "id-reused": ("new A n=4 [1] / fin A / new A n=4 [1]", "new A n=4 [1] / fin A; new A n=4 [1]"),
    "id-reused-at-once": ("new A n=4 [1] / fin A; new A n=4 [1]",),
    "row-moved": (
        "new A [1]; new B [2] / fin A; run B",
        "new A [1]; new B [2] / run A / run B; run A",
        "new A [1]; new B [2] / preempt B / resume B n=2 [2]",
    ),
    "batch-reordered": (
        "new A [1]; new B [2] / run B; run A",
        "new A [1]; new B [2]; new C [3] / run C; new D [4]; run B",
        "new A [1]; new B [2] / preempt A B; resume B n=2 [3]; resume A n=2 [4]",
    ),
    "alive-not-scheduled": ("new A [1]; new B [2] / run A", "new A [1] / fin X"),
    "padded-step": ("new A n=3 [1]; pad 4",),
    "big-batch": (many(256),),
    "empty-step": ("new A [1] / fin A",),
    "content-tagged": ("new A n=4 [1] content=x", "new A n=4 [1] content=x@2"),
    "same-tokens-other-content": (
        "new A n=4 [1] content=x / fin A; new B c=4 n=2 [1,3] content=y",
        "new A n=4 [1] / fin A; new B c=4 n=2 [1,3] content=y",
        "new A n=8 [1,2] content=x@4 / fin A; new B c=8 n=1 [1,2,3] content=y@5",
        "new A n=4 [1] content=x / fin A; new B c=4 n=2 [1,3] content=x@1",
    ),
    "drafts": ("new A n=4 [1] / run A n=3 [1,2] drafts=2",),
    "drafts-rejected": (
        "new A n=4 [1] / run A n=3 [1,2] drafts=2 / run A c=6",
        "new A n=4 [1] / run A n=3 [1,2] drafts=2 / new B [3] / run A c=5",
    ),
}

MISS: dict[str, tuple[str, ...]] = {
    "cold": ("new B c=4 n=1 [5,3]", "new A c=4 n=1 [1,3] / preempt A / resume A n=6 [1,2]"),
    "hit-one-block": ("new B c=8 n=1 [1,2,3]", "new B c=5 n=1 [1,2]", "new B c=3 n=1 [1]", "new A n=4 [1]"),
    "hit-many-blocks": ("new B c=4 n=1 [1,2]", "new B c=7 n=1 [1,2]"),
    "hit-over-100-blocks": (long_hit(100),),
    "hit-inside-a-block": (
        "new B c=4 n=1 [1,2]",
        "new A n=3 [1]",
        "new A n=7 [1,2] / preempt A / resume A c=3 n=5 [1,2]",
    ),
    "full-prompt-hit": ("new B c=4 n=5 [1,2,3]", "new B c=4 n=8 [1,2,3]", "new A n=4 [1]", "new B c=3 n=1 [1]"),
    "all-whole-blocks-hit": (
        "new B c=4 n=6 [1,2,3]",
        "new B c=4 n=4 [1,2]",
        "new A n=3 [1]",
        "new B c=8 n=1 [1,2,3] p=8",
    ),
    "prompt-within-a-block": ("new A n=4 [1]", "new A n=3 [1] p=4 / run A"),
    "prompt-of-one-block": ("new A n=3 [1]", "new A n=8 [1,2]", "new A n=3 [1] / run A"),
    "one-token-past-a-block": ("new A n=1 [1]", "new A n=4 [1]", "new A n=6 [1,2]", "new A n=4 [1] / run A [1,2]"),
    "same-step-hit": (
        "new A n=8 [1,2] / run A [1,2,3]; new B c=4 n=3 [1,4]",
        "new Z n=4 [1]; new A n=4 [2]; new B c=4 n=3 [3,4]",
    ),
    "same-step-hit-reader-first": ("new Z n=4 [1] / fin Z; new A n=8 [1,2]; new B c=4 n=3 [1,3]",),
    "hit-one-step-later": (
        "new A n=4 [1] / run A [1,2] / new B c=4 n=2 [1,3]",
        "new A n=4 [1] / fin A / new B c=4 n=2 [1,3]",
        "new Z n=4 [1] / fin Z; new A n=4 [1]; new B c=4 n=3 [1,3]",
    ),
    "hit-on-running-owner": (
        "new A n=4 [1] / preempt A; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / fin A; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / fin A; new A c=4 n=2 [1,3]",
        "new A n=4 [1] / replace A c=4 n=2 [1,3]",
        "new Z n=4 [1] / fin Z; new A n=4 [1]; new B c=4 n=3 [1,3]",
        "new A n=4 [1]; new B n=2 [2] p=4 / run B n=2 / preempt B / resume B c=4 n=1 [1,3]",
    ),
    "hit-on-preempted-owner": (
        "new A n=4 [1] / preempt A; resume A n=5 [6,7]; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A / fin A; new B c=4 n=2 [1,3]",
        "new A n=4 [1]; new B n=4 [2] / preempt B; new C c=4 n=2 [1,3]",
    ),
    "hit-on-finished-owner": (
        "new A n=4 [1] / new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A; new B c=4 n=2 [1,3]",
        "new Z n=4 [1] / fin Z; new A n=4 [1]; new B c=4 n=3 [1,3]",
        "new Z n=4 [1] / fin Z; new A n=4 [1] / new B c=4 n=3 [1,3]",
    ),
    "hit-on-several-owners": (
        "new A n=8 [1,2] / fin A; new C c=8 n=1 [1,2,3]",
        "new A n=4 [1] / fin A; new C c=8 n=1 [1,2,3]",
        "new A n=8 [1,2] p=12 / preempt A / resume A c=4 n=8 [1,5,6] / new C c=8 n=1 [1,5,7]",
    ),
    "hit-on-decoded-rows": (
        "new A n=4 [1] / run A [1,2] / fin A; new B c=4 n=2 [1,3]",
        "new A n=3 [1] p=4 / run A / fin A; new B c=4 n=2 [1,2]",
        "new A n=3 [1] / run A / fin A; new Z n=4 [1] / fin Z; new B c=4 n=2 [1,2]",
    ),
    "hit-on-unknown-rows": ("new A n=4 [1] / fin A; new B c=4 n=2 [1,3]", "new A n=4 [1]; new B c=4 n=2 [1,3]"),
    "block-shared": (
        "new A n=4 [1] / new B c=4 n=2 [1,3]",
        "new A n=4 [1] / fin A; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A; new B c=4 n=2 [1,3] / resume A n=5 [4,5]; run B",
        "new A n=4 [1] / new B c=4 n=2 [1,3] / run B; fin A / run B; new C n=4 [4]",
        "new B c=8 n=1 [0,2,3]; new C c=8 n=1 [0,4,5]",
        "new B c=8 n=1 [2,2,3]; new C n=4 [4]",
    ),
    "evicted-and-reused": (
        "new A n=4 [1] / fin A; new B n=4 [2]",
        "new A n=4 [1] / fin A; new B c=4 n=2 [1,3]",
        "new A n=4 [1] / preempt A / resume A n=5 [1,2]",
        "new A n=6 [1,2] / replace A c=4 n=4 [1,2]",
        "new A n=4 [1] / run A n=3 [1,2] drafts=2 / run A c=5",
        "new A n=3 [1] / fin A; new B c=3 n=1 [1]",
    ),
    "block-filled-by-decode": (
        "new A n=4 [1]",
        "new A n=2 [1] p=4 / run A n=2",
        "new A n=2 [1] / run A",
        "new A n=3 [1] / run A; slots [-1]",
        "new A n=3 [1] / preempt A / resume A n=5 [2,3]",
    ),
    "pad-slot": ("new A n=3 [1]; pad 4", "new A n=3 [1]; slots [4,5,6,-1]; pad 4"),
    "chunked-prefill": (
        "new A n=8 [1,2] / run A [1,2,3] / run A",
        "new A n=4 [1] p=8 / preempt A / resume A n=8 [1,2]",
        "new A n=4 [1] p=8 / fin A",
    ),
    "chunked-hit": (
        "new A n=4 [1] / run A n=4 [1,2]",
        "new A n=4 [1] / new B c=4 n=4 [1,3] / run B [1,3,4]",
        "new A n=4 [1] / new B c=4 n=2 [1,3] p=8 / preempt B / resume B n=4 [5] / run B n=4 [5,6]",
    ),
    "mixed-step": (
        "new A n=4 [1]; new B n=4 [2] / run A [1,3]; run B [2,4]",
        "new A n=4 [1] / run A n=4 [1,2]; new B [3]",
    ),
    "preempted": ("new A n=4 [1] / fin A", "new A n=4 [1] / new B [3]"),
    "preempted-mid-prefill": (
        "new A n=4 [1] / preempt A",
        "new A n=4 [1] p=8 / run A n=4 [1,2] / preempt A",
        "new A n=4 [1] p=8 / fin A",
    ),
    "resumed-cold": ("new A n=4 [1] / preempt A / resume A c=4 n=1 [1,3]",),
    "resumed-with-hit": ("new A n=4 [1] / preempt A / resume A n=5 [1,3]", "new A n=4 [1] / new B c=4 n=1 [1,2]"),
    "resumed-on-others-rows": (
        "new A n=8 [1,2] / preempt A / resume A c=4 n=5 [1,3,4]",
        "new A n=4 [1] / preempt A; new B n=4 [2] / resume A n=5 [2,3]",
        "new A n=4 [1] / preempt A / resume A c=4 n=1 [5,3]",
    ),
    "resumed-at-once": (
        "new A n=4 [1] / preempt A / resume A n=5 [2,3]",
        "new A n=4 [1] / new B [3] / preempt A; resume A n=5 [2,4]",
    ),
    "replaced": ("new A n=4 [1] / fin A; new A n=4 [2]",),
    "replaced-with-hit": ("new A n=4 [1] / replace A n=4 [2]", "new A n=4 [1] / fin A; new A c=4 n=2 [1,2]"),
    "ended-mid-prefill": (
        "new A n=4 [1] p=8 / run A n=4 [1,2] / fin A",
        "new A n=4 [1] / preempt A / fin A",
        "new A n=4 [1] p=8 / new B n=8 [3,4]; preempt A / resume A c=8 n=1 [3,4,5] / fin A",
        "new A n=4 [1] p=8 / replace A n=4 [2] / fin A",
    ),
    "ended-while-preempted": (
        "new A n=4 [1] / preempt A / resume A n=5 [2,3] / fin A",
        "new A n=4 [1] / preempt A / replace A n=4 [2] / fin A",
    ),
    "ended-unseen": ("new A n=4 [1] / fin A", "new A n=4 [1] / fin A / fin A", "new A n=4 [1] / fin A A"),
    "id-reused": ("new A n=4 [1] / fin A; new B n=4 [1]", "new A n=4 [1] / replace A n=4 [2]"),
    "id-reused-at-once": ("new A n=4 [1] / fin A / new A n=4 [1]", "new A n=4 [1] / fin A; new B n=4 [1]"),
    "row-moved": (
        "new A [1]; new B [2] / run A; run B",
        "new A [1]; new B [2] / run A / run A; run B",
        "new A [1]; new B [2] / fin A B; new B [2]; new A [1]",
    ),
    "batch-reordered": (
        "new A [1]; new B [2]; new C [3] / fin A; run B; run C",
        "new A [1]; new B [2] / run A / run B; run A",
        "new A [1]; new B [2] / fin B; new B [3]; run A",
        "new A [1]; new B [2] / replace B [3]; run A",
    ),
    "alive-not-scheduled": ("new A [1]; new B [2] / preempt B; run A", "new A [1]; new B [2] / fin B; run A"),
    "padded-step": ("new A n=4 [1]; pad 4", "new A n=4 [1]; slots [4,5,6,-1]"),
    "big-batch": (many(255),),
    "empty-step": ("new A [1] / run A",),
    "content-tagged": ("new A n=4 [1]",),
    "same-tokens-other-content": (
        "new A n=4 [1] content=x / fin A; new B c=4 n=2 [1,3] content=x",
        "new A n=8 [1,2] content=x@4 / fin A; new B c=4 n=4 [1,3] content=y@4",
        "new A n=3 [1] content=x / fin A; new B c=3 n=1 [1] content=y",
        "new A n=4 [1] content=x / fin A; new B n=4 [1] content=y",
    ),
    "drafts": ("new A n=4 [1] / run A n=3 [1,2]",),
    "drafts-rejected": (
        "new A n=4 [1] / run A n=3 [1,2] drafts=2 / run A",
        "new A n=4 [1] / run A n=3 [1,2] drafts=2 / preempt A / resume A n=5 [4,5]",
        "new A n=4 [1] / run A n=3 [1,2] drafts=2 / fin A; new A n=4 [3]",
    ),
}  # fmt: skip


def cases(stories: dict[str, tuple[str, ...]]) -> list[Any]:
    return [
        pytest.param(state, story, id=f"{state}-{at}")
        for state, told in stories.items()
        for at, story in enumerate(told)
    ]


def test_every_state_has_a_sentence_a_story_and_a_near_miss() -> None:
    assert list(REACH) == list(MISS) == list(STATES)
    assert all(sentence.endswith(".") and sentence[0].isalnum() for sentence in STATES.values())
    assert len(set(STATES.values())) == len(STATES)


@pytest.mark.parametrize(("state", "story"), cases(REACH))
def test_a_story_reaches_a_state(state: str, story: str) -> None:
    assert reaches(story, state)


@pytest.mark.parametrize(("state", "story"), cases(MISS))
def test_a_near_miss_does_not(state: str, story: str) -> None:
    assert not reaches(story, state)


@pytest.mark.parametrize(
    ("story", "state", "times"),
    [
        ("new A n=8 [1,2] / new B c=8 n=2 [1,2,3]; new C c=4 n=2 [1,4]", "hit-on-running-owner", 2),
        ("new A n=8 [1,2] / fin A; new B n=3 [1]; new C n=2 [2]", "evicted-and-reused", 5),
        ("new A n=2 [1] / run A n=2 / run A n=4 [1,2] / run A n=2 [1,2,3]", "chunked-prefill", 1),
        ("new A n=2 [1] p=6 / run A n=2 / preempt A / resume A n=2 [1] / run A n=2", "chunked-prefill", 2),
        ("new A [1]; new B [2]; new C [3] / run A / run A", "alive-not-scheduled", 4),
        ("new A n=4 [1] / preempt A / preempt A", "preempted", 1),
        ("new A n=4 [1] / run A [1,2]; new B c=4 n=2 [1,3] / run A; run B / run A", "block-shared", 2),
        ("new A n=4 [1] / run A n=3 [1,2] drafts=2 / run A n=3 c=5 drafts=1 / run A c=8 [1,2,3]", "drafts-rejected", 1),
        ("new A [1]; new B [2]; new C [3] / run C; run B; run A", "batch-reordered", 1),
        ("new A n=3 [1]; new B n=7 [2,3] / run A; run B / run A [1,4]; run B [2,3,5]", "block-filled-by-decode", 2),
    ],
)
def test_a_state_is_counted_once_for_each_time(story: str, state: str, times: int) -> None:
    assert reaches(story, state) == times


def test_where_a_state_was_first_seen() -> None:
    seen = cover(
        story_trace("new A n=4 [1]; new B n=4 [2] / new C c=4 n=2 [1,3]; pad 4 / new D c=4 n=2 [1,4]; run B [2,5]")
    )
    assert seen.first["cold"] == Seen("story", 0, "A")
    assert seen.first["hit-one-block"] == Seen("story", 1, "C")
    assert seen.first["padded-step"] == Seen("story", 1, None)
    assert seen.first["alive-not-scheduled"] == Seen("story", 1, "A")
    assert seen.first["mixed-step"] == Seen("story", 2, None)
    late = cover(story_trace("new A n=3 [1]; new B n=3 [2] / fin A; run B; new C n=3 [1]"))
    assert late.first["evicted-and-reused"] == Seen("story", 1, "C")
    assert late.first["block-filled-by-decode"] == Seen("story", 1, "B")
    shared = "new A n=4 [1]; new X [5] / run X; run A [1,2]; new B c=4 n=2 [1,3]"
    assert cover(story_trace(shared)).first["block-shared"] == Seen("story", 1, "A")


# Blocks that are split, and what is not told


def test_hits_are_measured_in_blocks_and_not_in_the_kernels() -> None:
    hit = "new A n=8 [2,3] / fin A; new B c=8 n=1 [2,3,6]"
    reached = cover(story_trace(hit, **KERNEL)).counts
    assert {"hit-one-block", "all-whole-blocks-hit", "prompt-of-one-block", "hit-on-finished-owner"} <= reached.keys()
    assert not {"hit-many-blocks", "hit-inside-a-block", "hit-on-unknown-rows"} & reached.keys()
    assert reaches("new A n=8 [2,3] / fin A; new B c=4 n=1 [2,3]", "hit-inside-a-block", **KERNEL)


def test_a_decode_fills_a_block_and_not_the_first_half_of_one() -> None:
    assert reaches("new A n=7 [2,3] / run A", "block-filled-by-decode", **KERNEL) == 1
    assert not reaches("new A n=3 [2] / run A", "block-filled-by-decode", **KERNEL)


def test_blocks_of_one_token() -> None:
    assert reaches("new A n=2 [1,2]", "one-token-past-a-block", block_size=1)
    assert not reaches("new A n=1 [1]", "one-token-past-a-block", block_size=1)
    assert reaches("new A n=1 [1] / run A [1,2]", "block-filled-by-decode", block_size=1)


OF_CONTENT = {"content-tagged", "same-tokens-other-content"}
OF_LENGTHS = {
    *("full-prompt-hit", "all-whole-blocks-hit"),
    *("prompt-within-a-block", "prompt-of-one-block", "one-token-past-a-block"),
    *("hit-on-decoded-rows", "block-filled-by-decode", "chunked-prefill", "chunked-hit", "mixed-step"),
    *("preempted-mid-prefill", "ended-mid-prefill"),
}  # fmt: skip


def without_lengths(trace: Trace) -> Trace:
    def records() -> Iterator[tuple[int, StepRecord]]:
        for line, record in enumerate(redact(trace, "none")[1]):
            new = tuple(without_length(request) for request in record.scheduled_new_reqs)
            yield line, replaced(record, scheduled_new_reqs=new)

    return Trace("blind", redact(trace, "none")[0], records)


def replaced(record: StepRecord, **fields: Any) -> StepRecord:
    return StepRecord(**{name: fields.get(name, getattr(record, name)) for name in StepRecord.__struct_fields__})


def without_length(request: NewRequest) -> NewRequest:
    return NewRequest(req_id=request.req_id, replace=request.replace)


@pytest.mark.parametrize(("state", "story"), cases(REACH))
def test_what_is_not_told_is_not_seen_and_all_else_is(state: str, story: str) -> None:
    trace = story_trace(story)
    counts = cover(trace).counts
    header, records = redact(trace, "none")
    written = list(enumerate(records))
    blind = cover(Trace("blind", header, lambda: iter(written)))
    assert blind.counts == {name: times for name, times in counts.items() if name not in OF_CONTENT}
    dark = cover(without_lengths(trace))
    assert dark.counts == {name: times for name, times in counts.items() if name not in OF_CONTENT | OF_LENGTHS}


def test_hashed_ids_still_show_the_same_tokens_with_other_tags() -> None:
    header, records = redact(story_trace(REACH["same-tokens-other-content"][0]), "hashed")
    written = list(enumerate(records))
    assert cover(Trace("hashed", header, lambda: iter(written))).times("same-tokens-other-content") == 1


def test_a_third_tag_differs_from_one_of_the_others() -> None:
    story = "new A n=4 [1] content=x / new B c=4 n=2 [1,3] content=y / new C c=4 n=2 [1,4] content=x"
    assert reaches(story, "same-tokens-other-content") == 2


# Sums


def test_traces_add_up_and_the_first_stays_the_first() -> None:
    one = cover(story_trace("new A n=4 [1]; new B n=4 [2]"))
    other = cover(story_trace("new C n=4 [1] / new D c=4 n=2 [1,2]"))
    total = one + other
    assert (total.times("cold"), total.times("hit-one-block"), total.times("preempted")) == (3, 1, 0)
    assert total.first["cold"] == Seen("story", 0, "A")
    assert total.first["hit-one-block"] == Seen("story", 1, "D")
    assert one + Coverage() == Coverage() + one == one
    assert total.counts.keys() == total.first.keys()


def test_what_falls_short_is_named() -> None:
    seen = cover(story_trace("new A n=4 [1]; new B n=4 [2]"))
    assert seen.short_of({"cold": 2, "preempted": 1}) == ["preempted"]
    assert seen.short_of({"cold": 3}) == ["cold"]
    assert seen.short_of({}) == []


def test_a_watcher_can_be_asked_at_any_time() -> None:
    trace = story_trace("new A n=4 [1] / new B c=4 n=2 [1,2]")
    watcher = Watcher(trace.header.cache)
    told = []
    for step in trace.steps():
        watcher.see(step)
        told.append(watcher.coverage)
    assert [seen.times("hit-one-block") for seen in told] == [0, 1]
    assert told[-1].first["hit-one-block"] == Seen("", 1, "B")


def test_a_trace_that_breaks_off_raises() -> None:
    with pytest.raises(IllegalSchedule):
        cover(story_trace("new A n=4 [1] / run A c=9 [1,2,3]"))


# The recordings

FACTS = {
    "chat-roomy": {"hit-on-running-owner": 5, "hit-on-finished-owner": 20, "chunked-prefill": 2},
    "chat-tight": {"hit-on-running-owner": 2, "hit-on-finished-owner": 23, "preempted": 3, "resumed-with-hit": 3},
    "chat-burst": {"same-step-hit": 5, "hit-on-finished-owner": 20},
    "chat-abort": {"hit-on-running-owner": 5, "hit-on-finished-owner": 20, "ended-unseen": 1},
    "chat-roomy-nocache": {"cold": 28},
}
PINNED = {
    *("same-step-hit", "hit-on-running-owner", "hit-on-preempted-owner", "hit-on-finished-owner", "preempted"),
    *("resumed-with-hit", "resumed-cold", "ended-unseen", "ended-mid-prefill", "hit-on-unknown-rows", "id-reused"),
}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_the_counts_of_a_recording_are_what_its_readme_tells(path: Path) -> None:
    name = path.name.partition(".")[0]
    counts = cover(load(path)).counts
    assert {state: counts[state] for state in FACTS[name]} == FACTS[name]
    assert PINNED & counts.keys() == PINNED & FACTS[name].keys()
    num_hits = counts.get("hit-one-block", 0) + counts.get("hit-many-blocks", 0)
    assert num_hits == (0 if "nocache" in name else 25)


# A slow reference, and schedules made up by chance


@dataclasses.dataclass(eq=False)
class Row:
    """Who computed a slot, when, at which position, and whether that was before its writer was last preempted."""

    owner: Request
    step: int
    past_prompt: bool
    turn: int


@dataclasses.dataclass(eq=False)
class Request:
    """One request, for as long as it lives and after."""

    name: str
    prompt: int | None
    seat: int
    state: str = "running"
    turn: int = 0
    row: int | None = None
    drafted: int | None = None


def reference(trace: Trace) -> Counter[str]:
    """States of hits, slots and rows, token by token with a dict, straight from the sentences."""
    counts: Counter[str] = Counter()
    living: dict[str, Request] = {}
    slots: dict[int, Row] = {}
    cache = trace.header.cache
    before: list[Request] = []
    for number, step in enumerate(trace.steps()):
        for name in step.finished_req_ids:
            if name in living:
                counts["ended-while-preempted"] += living[name].state == "preempted"
                living.pop(name).state = "over"
        for name in step.preempted_req_ids:
            counts["preempted"] += living[name].state == "running"
            living[name].state = "preempted"
            living[name].drafted = None
        for name in step.resumed_req_ids:
            counts["resumed-at-once"] += living[name] in before
            living[name].state = "running"
            living[name].turn += 1
            living[name].drafted = None
        for at, new in enumerate(step.scheduled_new_reqs):
            seat = 1000 * number + at
            if new.req_id in living:
                living[new.req_id].state = "over"
                seat = living[new.req_id].seat
            prompt = step.num_prompt_tokens[step.req_ids.index(new.req_id)]
            living[new.req_id] = Request(new.req_id, None if prompt < 0 else prompt, seat)
        batch = [living[name] for name in step.req_ids]
        old = dict(slots)
        written: dict[int, int] = {}
        for row, request in enumerate(batch):
            for at in range(step.query_start_loc[row], step.query_start_loc[row + 1]):
                position = step.num_computed_tokens[row] + at - step.query_start_loc[row]
                slot = int(step.slot_mapping[at])
                decodes = request.prompt is not None and step.num_computed_tokens[row] >= request.prompt
                counts["pad-slot"] += slot < 0
                if slot < 0:
                    continue
                counts["block-filled-by-decode"] += decodes and (slot + 1) % cache.block_size == 0
                had = old.get(slot)
                if had is not None and had.owner.seat != request.seat:
                    gone = had.owner.state != "running" or had.turn < had.owner.turn
                    counts["evicted-and-reused"] += gone
                past = request.prompt is not None and position >= request.prompt
                slots[slot] = Row(request, number, past, request.turn)
                written[slot] = row
        entering = {new.req_id for new in step.scheduled_new_reqs}
        for row, request in enumerate(batch):
            if request.name in entering and step.num_computed_tokens[row]:
                counts.update(reference_hit(trace, step, row, old, slots, written, number))
        for name in step.resumed_req_ids:
            row = step.req_ids.index(name)
            owners = {slots[slot].owner.seat for slot in prefix(trace, step, row) if slot in slots}
            counts["resumed-with-hit" if step.num_computed_tokens[row] else "resumed-cold"] += 1
            counts["resumed-on-others-rows"] += bool(owners - {living[name].seat})
        counts.update(reference_rows(batch, before, living, step))
        before = batch
    return +counts


def prefix(trace: Trace, step: Step, row: int) -> list[int]:
    size = trace.header.cache.kernel_block_size or trace.header.cache.block_size
    return [step.block_table[row][at // size] * size + at % size for at in range(step.num_computed_tokens[row])]


def reference_hit(
    trace: Trace, step: Step, row: int, old: dict[int, Row], slots: dict[int, Row], written: dict[int, int], number: int
) -> set[str]:
    found, owners = set(), set()
    for slot in prefix(trace, step, row):
        now, had, writer = slots.get(slot), old.get(slot), written.get(slot, row)
        if now is not None:
            owners.add(now.owner.seat)
            if now.past_prompt:
                found.add("hit-on-decoded-rows")
        if writer != row:
            found.add("same-step-hit")
            if writer > row:
                found.add("same-step-hit-reader-first")
        elif had is None:
            found.add("hit-on-unknown-rows")
        else:
            kind = {"running": "running", "preempted": "preempted", "over": "finished"}[had.owner.state]
            found.add(f"hit-on-{kind}-owner")
            if had.step == number - 1:
                found.add("hit-one-step-later")
    return found | ({"hit-on-several-owners"} if len(owners) > 1 else set())


def reference_rows(batch: list[Request], before: list[Request], living: dict[str, Request], step: Step) -> Counter[str]:
    counts: Counter[str] = Counter()
    stay = [request.row for request in batch if request in before]
    counts["batch-reordered"] += stay != sorted(stay)  # type: ignore[type-var]
    for row, request in enumerate(batch):
        counts["row-moved"] += request.row not in (None, row)
        request.row = row
        ids = step.scheduled_spec_decode_tokens.get(request.name, ())
        counts["drafts-rejected"] += request.drafted is not None and step.num_computed_tokens[row] < request.drafted
        request.drafted = step.num_computed_tokens[row] + step.num_scheduled_tokens[row] if ids else None
    counts["alive-not-scheduled"] += sum(one.state == "running" and one not in batch for one in living.values())
    held = Counter(block for blocks in step.block_table for block in set(blocks) if block)
    counts["block-shared"] += any(times > 1 for times in held.values())
    return counts


KNOWN = {
    *("same-step-hit", "same-step-hit-reader-first", "hit-one-step-later", "hit-on-running-owner"),
    *("hit-on-preempted-owner", "hit-on-finished-owner", "hit-on-several-owners", "hit-on-decoded-rows"),
    *("hit-on-unknown-rows", "evicted-and-reused", "block-filled-by-decode", "pad-slot", "block-shared", "row-moved"),
    *("batch-reordered", "alive-not-scheduled", "preempted", "resumed-at-once", "ended-while-preempted"),
    *("resumed-cold", "resumed-with-hit", "resumed-on-others-rows", "drafts-rejected"),
}
"""States that the reference tells too."""


class Wild:
    """A scheduler that does whatever is legal: hits on any block, evictions of living ones, forced resets, drafts."""

    num_blocks = 40
    size = 4

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tidy = seed % 5 > 0  # else a request may have a block twice
        self.ends: dict[str, int] = {}
        self.drafts: dict[str, int] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.waiting: set[str] = set()

    def records(self, num_steps: int) -> Iterator[StepRecord]:
        for index in range(num_steps):
            yield self.step(index)

    def some(self, names: Any, share: float) -> list[str]:
        return [name for name in sorted(names) if self.chance.random() < share]

    def step(self, index: int) -> StepRecord:
        chance = self.chance
        finished = self.some(self.ends, 0.08)
        for name in finished:
            self.forget(name)
        preempted = self.some(self.ends.keys() - self.waiting, 0.5 if chance.random() < 0.05 else 0.06)
        self.waiting.update(preempted)
        resumed = self.some(self.waiting, 0.4)
        self.waiting.difference_update(resumed)
        replacing = self.some(self.ends.keys() - set(resumed), 0.03)
        names = [chance.choice("abcdefgh") + chance.choice(["", "", str(index)]) for _ in range(chance.randint(0, 2))]
        fresh = [name for name in dict.fromkeys(names) if name not in self.ends and len(self.ends) < 9]
        for name in replacing:
            self.forget(name)
        new = {name: chance.choice([None, *range(1, 14)]) for name in (*replacing, *fresh)}
        for name in new:
            self.ends[name] = 0
        running = self.ends.keys() - self.waiting
        batch = [name for name in sorted(running) if name in new or name in resumed or chance.random() < 0.85]
        if chance.random() < 0.4:
            chance.shuffle(batch)
        told = self.written(batch, set(new) | set(resumed)) | {
            "finished_req_ids": tuple(finished),
            "preempted_req_ids": tuple(preempted),
            "resumed_req_ids": tuple(resumed),
            "scheduled_new_reqs": tuple(
                NewRequest(req_id=name, num_prompt_tokens=prompt, replace=name in replacing)
                for name, prompt in new.items()
            ),
        }
        return StepRecord(**told)

    def forget(self, name: str) -> None:
        del self.ends[name]
        self.blocks.pop(name, None)
        self.drafts.pop(name, None)
        self.waiting.discard(name)

    def written(self, batch: list[str], entering: set[str]) -> dict[str, Any]:
        chance, size = self.chance, self.size
        free = list(range(1, self.num_blocks))
        chance.shuffle(free)
        taken: set[int] = set()
        fields: dict[str, Any] = {"block_ids": {}, "new_block_ids": {}, "scheduled_spec_decode_tokens": {}}
        starts, counts, slots = [], [], []
        for name in batch:
            start = self.ends[name] - chance.randint(0, self.drafts.get(name, 0))
            blocks = self.blocks.get(name, ())
            if name in entering:
                start = chance.choice([0, 0, size, 2 * size, 3 * size, chance.randint(1, 3 * size)])
                blocks = tuple(chance.sample(range(self.num_blocks), -(-start // size)))
            count = chance.choice([1, 1, 2, chance.randint(1, 9)])
            first, last = start // size, (start + count - 1) // size
            row = list(blocks[: last + 1])
            for at in range(first, last + 1):
                if at >= len(row):
                    row.append(next(block for block in free if block not in (taken | set(row))))
                elif row[at] in taken:
                    row[at] = next(block for block in free if block not in (taken | set(row) if self.tidy else taken))
                taken.add(row[at])
            self.blocks[name] = tuple(row) + blocks[last + 1 :]
            fields["block_ids"][name] = self.blocks[name]
            self.drafts[name] = chance.randint(0, count - 1) if chance.random() < 0.3 else 0
            if self.drafts[name]:
                fields["scheduled_spec_decode_tokens"][name] = (0,) * self.drafts[name]
            self.ends[name] = start + count
            starts.append(start)
            counts.append(count)
            slots += [row[at // size] * size + at % size for at in range(start, start + count)]
        padded = [-1 if chance.random() < 0.02 else slot for slot in slots]
        return fields | {
            "req_ids": tuple(batch),
            "num_computed_tokens": tuple(starts),
            "num_scheduled_tokens": tuple(counts),
            "slot_mapping": tuple(padded),
        }


def wild(seed: int, num_steps: int) -> Trace:
    size, kernel = (8, 4) if seed % 4 == 3 else (4, None)
    header = Header(
        format="omnisim-trace/1",
        producer=Producer(name="chance"),
        cache=Geometry(num_blocks=Wild.num_blocks, block_size=size, kernel_block_size=kernel),
        content="none",
    )
    records = list(Wild(seed).records(num_steps))
    return Trace(f"seed {seed}", header, lambda: iter(enumerate(records)))


def told(counts: Any) -> dict[str, int]:
    return {state: times for state, times in counts.items() if state in KNOWN}


@pytest.mark.parametrize("seed", range(40))
def test_the_reference_counts_the_same_in_whatever_is_legal(seed: int) -> None:
    trace = wild(seed, 150)
    assert told(cover(trace).counts) == reference(trace)


def test_what_is_legal_reaches_all_that_the_reference_tells() -> None:
    total = sum((cover(wild(seed, 150)) for seed in range(8)), Coverage())
    assert KNOWN - total.counts.keys() == set()


@pytest.mark.parametrize("seed", range(10))
def test_the_reference_counts_the_same_in_made_up_schedules(seed: int) -> None:
    trace = Trace("chance", schedules.header(), lambda: enumerate(schedules.schedule(seed, 120)))
    counts = cover(trace).counts
    assert told(counts) == reference(trace)
    assert counts["evicted-and-reused"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_the_reference_counts_the_same_in_recordings(path: Path) -> None:
    trace = load(path)
    assert told(cover(trace).counts) == reference(trace)


# What a replay says of the same hits


def told_kind(states: Counter[str]) -> str:
    """The kind that a replay gives a hit which reaches these states."""
    for state, kind in (
        ("hit-on-unknown-rows", "unknown owner"),
        ("same-step-hit", "same step"),
        ("hit-on-running-owner", "running owner"),
        ("hit-on-preempted-owner", "running owner"),  # of a replay: alive
    ):
        if states[state]:
            return kind
    return "finished owner"


@pytest.mark.parametrize("seed", [seed for seed in range(15) if seed % 5])
def test_hits_are_of_the_kind_that_a_replay_says(seed: int) -> None:
    trace, seen, num_hits = wild(seed, 100), Counter[str](), 0
    watcher = Watcher(trace.header.cache)
    truth = Truth(trace.header.cache, (), ProvenanceNames(), "provenance")
    for step in trace.steps():
        kinds = [prefix.kind for prefix in truth.due(step, ()).prefixes.values() if prefix.kind != "resumed"]
        watcher.see(step)
        states = Counter(watcher.coverage.counts) - seen
        seen += states
        if len(kinds) == 1:
            num_hits += 1
            assert told_kind(states) == kinds[0]
    assert num_hits > 10


# What it keeps


def copied(step: Step) -> Step:
    """The step in values of its own, none the same as of the step before."""
    return dataclasses.replace(
        step,
        req_ids=(*step.req_ids,),
        block_table=tuple((*row,) for row in step.block_table),
        slot_mapping=step.slot_mapping.copy(),
    )


@pytest.mark.parametrize("seed", range(4))
def test_steps_need_not_share_their_values(seed: int) -> None:
    trace = wild(seed, 100)
    watcher = Watcher(trace.header.cache, trace.path)
    for step in trace.steps():
        watcher.see(copied(step))
    assert watcher.coverage == cover(trace)


def passing(num_requests: int) -> Trace:
    """Requests that come and go, one after another, over the same few blocks; another one stays."""

    def records() -> Iterator[tuple[int, StepRecord]]:
        for at in range(num_requests):
            blocks = {f"r{at}": (2 + at % 8, 10 + at % 8), **({"stays": (1,)} if at == 0 else {})}
            new = [NewRequest(req_id=f"r{at}", prompt_token_ids=tuple(range(at, at + 8)))]
            new += [NewRequest(req_id="stays", prompt_token_ids=(1,))] if at == 0 else []
            yield (
                at,
                StepRecord(
                    req_ids=(f"r{at}", "stays") if at == 0 else (f"r{at}",),
                    num_computed_tokens=(0, 0) if at == 0 else (0,),
                    num_scheduled_tokens=(8, 1) if at == 0 else (8,),
                    block_ids=blocks,
                    scheduled_new_reqs=tuple(new),
                    finished_req_ids=(f"r{at - 1}",) if at else (),
                ),
            )

    header = schedules.header()
    return Trace("passing", header, records)


def peak(trace: Trace) -> int:
    tracemalloc.start()
    cover(trace)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def test_memory_is_bounded_by_what_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_ENDED", 100)
    monkeypatch.setattr(room, "LEAST_PROMPT_BLOCKS", 100)
    peak(passing(10))
    assert peak(passing(6000)) < 2 * peak(passing(1500))


def test_many_requests_are_told_apart_by_fewer_numbers() -> None:
    trace = passing(3000)
    counts = cover(trace).counts
    assert told(counts) == reference(trace)
    assert counts["cold"] == 3001


def test_an_id_that_ended_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_ENDED", 2)
    story = "new A [1] / fin A / fin B / fin C / new A [1] / fin A; new A [1]"
    assert reaches(story, "id-reused") == 1


def test_prompts_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    story = "new A n=4 [1] content=x / fin A; new B n=8 [2,3] / fin B; new C c=4 n=2 [1,4] content=y"
    assert reaches(story, "same-tokens-other-content", num_blocks=5) == 1
    monkeypatch.setattr(room, "LEAST_PROMPT_BLOCKS", 1)
    assert reaches(story, "same-tokens-other-content", num_blocks=5) == 1
    longer = story.replace("n=8 [2,3]", "n=20 [0,2,3,4,4]".replace("4,4", "1,4"))
    assert reaches(longer, "same-tokens-other-content", num_blocks=5) == 0


def test_a_cache_for_which_there_is_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(room._Ledger, "reach", none)
    with pytest.raises(
        SetupError, match=r"^story, step 0: no memory for a cache of 8 slots; watch a trace of a smaller"
    ):
        cover(story_trace("new A n=4 [1]"))


# What is required

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str) -> Path:
        path = tmp_path / "require.yaml"
        path.write_text(text)
        return path

    return write


HEAD = "format: omnisim-coverage-require/1\n"


def test_requirements_are_a_mapping_or_a_list(written: Written) -> None:
    assert room.read_required(written(HEAD + "states: {cold: 3, preempted: 1}")) == {"cold": 3, "preempted": 1}
    assert room.read_required(written(HEAD + "states: [cold, preempted]")) == {"cold": 1, "preempted": 1}


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (HEAD + "states:\n  same-step-hits: 1", ":3", "'same-step-hits' is no state; did you mean 'same-step-hit'?"),
        (HEAD + "states:\n- cold\n- prempted", ":4", "'prempted' is no state; did you mean 'preempted'?"),
        (HEAD + "states:\n- cold\n- cold", ":4", "'cold' is there twice; write states: {cold: 2} if you mean"),
        (HEAD + "states:\n  cold: 1\n  cold: 2", ":4", "the key 'cold' is there twice"),
        (HEAD + "states:\n  cold: 0", ":3", "states[...]: expected int >= 1"),
        (HEAD + "states:\n  cold: true", ":3", "states[...]: expected int, got bool"),
        (HEAD + "states:\n- 3", ":3", "states[0]: expected str, got int; put it in quotes"),
        (HEAD + "states: cold", ":2", "states: expected object | array, got str"),
        (HEAD + "states: {}", ":2", "it requires no state; name one, or leave out --require"),
        (HEAD + "states: []", ":2", "it requires no state"),
        (HEAD, ":1", "object missing required field states; add it"),
        (HEAD + "states: [cold]\nstate: [cold]", ":3", "object contains unknown field state"),
        ("format: omnisim-coverage/1\nstates: [cold]", ":1", "format 'omnisim-coverage/1' is not known"),
        ("states: [cold]", ":1", "object missing required field format"),
        ("", ":1", "the file is empty; it starts with format: omnisim-coverage-require/1"),
        ("a: ]", ":1", "this is not YAML"),
    ],
)  # fmt: skip
def test_a_file_of_requirements_that_is_wrong_is_refused_with_its_line(
    written: Written, text: str, place: str, what: str
) -> None:
    path = written(text)
    with pytest.raises(FileError) as error:
        room.read_required(path)
    assert str(error.value).startswith(f"{path}{place}: {what}")


def test_a_file_of_requirements_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(FileError, match=rf"^{path}: it cannot be read \({why}"):
            room.read_required(path)
