"""vLLM's own batch presents what the stand-in presents, and computes the slots that a trace tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from omnisim.batch import Batch, LightBatch, make_batch
from omnisim.errors import SetupError
from omnisim.trace.model import Geometry, Step
from tests.batch.steps import COMMITTED, GEOMETRY, STORY, TRACES, make_step

needs_vllm = pytest.mark.usefixtures("vllm")
needs_slot_kernel = pytest.mark.usefixtures("slot_kernel")


def presented(batch: Batch, step: Step) -> dict[str, object]:
    """Everything a cache reads, and that nothing stands in the table beside it."""
    seen, num_reqs = batch.input_batch, len(step.req_ids)
    table = seen.block_table[0].block_table.cpu
    widths = [len(row) for row in step.block_table]
    rows = [row[:width].tolist() for row, width in zip(table, widths, strict=False)]
    return {
        "req_ids": list(seen.req_ids),
        "req_id_to_index": dict(seen.req_id_to_index),
        "num_computed_tokens_cpu": seen.num_computed_tokens_cpu[:num_reqs].tolist(),
        "num_prompt_tokens": seen.num_prompt_tokens[:num_reqs].tolist(),
        "rows": rows,
        "sum of all rows": int(table.sum()) == sum(sum(row) for row in rows),
        "block_size": seen.block_table[0].block_size,
        "groups": [bool(group.block_table.cpu.any()) for group in seen.block_table.block_tables],
        "dtypes": (table.dtype, seen.num_computed_tokens_cpu.dtype, seen.num_prompt_tokens.dtype),
    }


def slots_by_vllm(batch: Batch, step: Step) -> list[int]:
    """The slot mapping as vLLM's runner computes it: block table to the device, then its kernel."""
    table, num_reqs = batch.input_batch.block_table, len(step.req_ids)
    spans = zip(step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
    positions = torch.tensor([at for start, count in spans for at in range(start, start + count)], dtype=torch.int64)
    table.commit_block_table(num_reqs)
    table.compute_slot_mapping(num_reqs, torch.tensor(step.query_start_loc, dtype=torch.int32), positions)
    slots: list[int] = table[0].slot_mapping.gpu[: step.num_tokens].tolist()
    return slots


def steps_of(path: Path) -> tuple[Geometry, Iterator[Step]]:
    from omnisim.trace import load

    trace = load(path)
    return trace.header.cache, iter(trace.steps())


@needs_vllm
@pytest.mark.parametrize("groups", [1, 3])
def test_both_batches_present_the_same_at_every_step_of_a_story(groups: int) -> None:
    geometry = Geometry(num_blocks=1000, block_size=4, num_kv_cache_groups=groups)
    light, vllm = LightBatch(geometry), make_batch("vllm", geometry)
    for moment, step in STORY.items():
        light.apply(step)
        vllm.apply(step)
        assert presented(vllm, step) == presented(light, step), moment


@needs_vllm
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(TRACES)))
def test_both_batches_present_the_same_at_every_step_of_a_committed_trace(path: Path) -> None:
    geometry, steps = steps_of(path)
    light, vllm = LightBatch(geometry), make_batch("vllm", geometry)
    for step in steps:
        light.apply(step)
        vllm.apply(step)
        assert presented(vllm, step) == presented(light, step), f"step {step.index}"


@needs_slot_kernel
@pytest.mark.parametrize("moment", [moment for moment, step in STORY.items() if step.req_ids])
def test_vllm_computes_the_slots_of_a_step(moment: str) -> None:
    batch = make_batch("vllm", GEOMETRY)
    batch.apply(STORY[moment])
    assert slots_by_vllm(batch, STORY[moment]) == STORY[moment].slot_mapping.tolist()


@needs_slot_kernel
@pytest.mark.parametrize("path", sorted(TRACES.glob("recorded/*.jsonl*")), ids=lambda path: path.name)
def test_vllm_computes_the_slots_that_a_recording_tells(path: Path) -> None:
    geometry, steps = steps_of(path)
    batch = make_batch("vllm", geometry)
    for step in steps:
        batch.apply(step)
        assert slots_by_vllm(batch, step) == step.slot_mapping.tolist(), f"step {step.index}"


@needs_vllm
def test_a_table_of_kernel_blocks_says_so() -> None:
    batch = make_batch("vllm", Geometry(num_blocks=8, block_size=8, kernel_block_size=4))
    batch.apply(make_step({"a": (0, 5, (2, 3))}, block_size=4, new=("a",)))
    assert batch.input_batch.block_table[0].block_size == 4


def test_without_vllm_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SetupError, match=r"--batch vllm needs vLLM, .*; .*pip install -e '\.\[vllm\]'"):
        make_batch("vllm", GEOMETRY)


def test_a_version_that_was_not_tried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "vllm": {"__version__": "0.9.1", "SamplingParams": object},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_input_batch": {},
    }
    for name, attributes in names.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module, raising=False)
    with pytest.raises(SetupError, match=r"--batch vllm knows vLLM 0\.32 and 0\.33, and this is 0\.9\.1"):
        make_batch("vllm", GEOMETRY)
