"""The stand-in presents what a step tells, whatever was before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omnisim.batch import BatchName, LightBatch, make_batch
from omnisim.trace.model import Geometry, Step
from tests.batch.steps import GEOMETRY, STORY, make_step


def assert_presents(batch: LightBatch, step: Step) -> None:
    seen = batch.input_batch
    num_reqs = len(step.req_ids)
    table = seen.block_table[0].block_table.cpu
    assert tuple(seen.req_ids) == step.req_ids
    assert seen.req_id_to_index == {req_id: index for index, req_id in enumerate(step.req_ids)}
    assert tuple(seen.num_computed_tokens_cpu[:num_reqs]) == step.num_computed_tokens
    assert tuple(seen.num_prompt_tokens[:num_reqs]) == step.num_prompt_tokens
    for row, told in zip(table.tolist(), step.block_table, strict=False):
        assert tuple(row[: len(told)]) == told
        assert not any(row[len(told) :])
    assert not table[num_reqs:].any()


def test_every_step_of_a_story_is_presented_whole() -> None:
    batch = LightBatch(GEOMETRY)
    for step in STORY.values():
        batch.apply(step)
        assert_presents(batch, step)


@pytest.mark.parametrize("moment", STORY)
def test_a_step_does_not_depend_on_the_steps_before(moment: str) -> None:
    batch = LightBatch(GEOMETRY)
    batch.apply(STORY[moment])
    assert_presents(batch, STORY[moment])


def test_the_table_is_an_int32_tensor_of_the_kernels_block_size() -> None:
    table = LightBatch(Geometry(num_blocks=8, block_size=8, kernel_block_size=4)).input_batch.block_table[0]
    assert table.block_table.cpu.dtype == torch.int32
    assert table.block_size == 4


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("name", ["light", "vllm"])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_the_group_that_the_trace_tells_has_its_rows(name: BatchName, group: int) -> None:
    geometry = Geometry(num_blocks=8, block_size=4, num_kv_cache_groups=3, full_attention_group=group)
    batch = make_batch(name, geometry)
    batch.apply(make_step({"a": (0, 8, (1, 2))}, new=("a",)))
    tables = batch.input_batch.block_table.block_tables
    rows = [np.asarray(table.block_table.cpu)[0, :2].tolist() for table in tables]
    assert rows == [[1, 2] if at == group else [0, 0] for at in range(3)]


def test_groups_that_the_trace_does_not_tell_have_empty_rows() -> None:
    batch = LightBatch(Geometry(num_blocks=8, block_size=4, num_kv_cache_groups=3))
    batch.apply(make_step({"a": (0, 4, (1,))}, new=("a",)))
    assert [bool(table.block_table.cpu.any()) for table in batch.input_batch.block_table.block_tables] == [
        True,
        False,
        False,
    ]


def test_whoever_keeps_a_buffer_sees_it_change() -> None:
    batch = LightBatch(GEOMETRY)
    batch.apply(STORY["two enter"])
    kept = batch.input_batch
    ids, counts, table = kept.req_ids, kept.num_computed_tokens_cpu, kept.block_table[0].block_table.cpu
    batch.apply(STORY["the first is not scheduled"])
    assert ids == ["b"]
    assert counts[0] == 7
    assert table[0, :2].tolist() == [2, 3]


def test_a_row_that_is_the_same_tuple_is_not_written_again() -> None:
    row = (1, 2)
    batch = LightBatch(GEOMETRY)
    batch.apply(make_step({"a": (0, 5, row)}))
    table = batch.input_batch.block_table[0].block_table.cpu
    table[0, 0] = 99
    batch.apply(make_step({"a": (5, 1, row)}))
    assert table[0, 0] == 99


def test_make_batch_makes_it_by_name() -> None:
    assert isinstance(make_batch("light", GEOMETRY), LightBatch)
