"""A caller that was written for the class's upstream path runs unchanged when that path is aliased to ours.

Such callers look into the storage, patch ``_get_cached_block_ids`` by its path, and hand over batches that have hardly
anything in them. Everything here goes through ``vllm_omni.core.prefix_cache``, as theirs does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import omnisim.cache

PATH = "vllm_omni.core.prefix_cache"
HOOK = f"{PATH}.OmniTensorPrefixCache._get_cached_block_ids"

NUM_BLOCKS, BLOCK_SIZE, HIDDEN_SIZE, MM_WIDTH = 10, 4, 3, 5


@pytest.fixture(autouse=True)
def upstream_path() -> Iterator[None]:
    """``vllm_omni.core.prefix_cache`` is ``omnisim.cache`` during a test."""
    names = ["vllm_omni", "vllm_omni.core", PATH]
    before = {name: sys.modules.get(name) for name in names}
    package, core = ModuleType("vllm_omni"), ModuleType("vllm_omni.core")
    package.core = core  # type: ignore[attr-defined]
    core.prefix_cache = omnisim.cache  # type: ignore[attr-defined]
    package.__path__ = core.__path__ = []
    sys.modules.update(dict(zip(names, [package, core, omnisim.cache], strict=True)))
    yield
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


def new_cache(dtype: torch.dtype = torch.float32) -> Any:
    from vllm_omni.core.prefix_cache import OmniTensorPrefixCache  # type: ignore[import-not-found, unused-ignore]

    return OmniTensorPrefixCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, hidden_size=HIDDEN_SIZE, hs_dtype=dtype)


def batch_of(*req_ids: str, computed: Any, tables: Any = None) -> Any:
    """The least a batch can have: with no ``tables``, not even block ids."""
    block_table: Any = SimpleNamespace(block_tables=[None])
    if tables is not None:
        table = SimpleNamespace(block_table=SimpleNamespace(cpu=torch.tensor(tables)))
        block_table = Groups([table])
        block_table.block_tables = [table]
    index = {req_id: row for row, req_id in enumerate(req_ids)}
    return SimpleNamespace(
        req_ids=list(req_ids), req_id_to_index=index, num_computed_tokens_cpu=computed, block_table=block_table
    )


class Groups(list[Any]):
    """A list that takes attributes."""


def slots(*blocks: int) -> torch.Tensor:
    return torch.tensor([block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)])


def test_the_path_leads_to_our_class() -> None:
    assert importlib.import_module(PATH).OmniTensorPrefixCache is omnisim.cache.OmniTensorPrefixCache


# Storage


def test_a_new_cache_has_hidden_storage_and_no_other() -> None:
    cache = new_cache(torch.bfloat16)
    assert cache.num_blocks == NUM_BLOCKS
    assert cache.block_size == BLOCK_SIZE
    assert cache.default_hidden_size == HIDDEN_SIZE
    assert cache.hidden_states_cache.shape == torch.Size([NUM_BLOCKS, BLOCK_SIZE, HIDDEN_SIZE])
    assert cache.hidden_states_cache.dtype == torch.bfloat16
    assert len(cache.mm_outputs_cache) == len(cache.mm_cache_keys) == 0


def test_keys_are_opened_once_with_their_own_width_and_dtype_and_keep_what_they_hold() -> None:
    cache, seq_len = new_cache(), 6
    outputs = {
        "layer": torch.rand(seq_len, MM_WIDTH),
        "codes": torch.zeros(seq_len, 2, dtype=torch.int64),
        "length": torch.arange(seq_len),
        "other": torch.rand(seq_len - 1, MM_WIDTH),
        "text": "x",
        "list": [torch.rand(seq_len, MM_WIDTH)],
    }
    cache.maybe_init_missing_mm_cache_keys(outputs, seq_len)
    assert cache.mm_cache_keys == {"layer", "codes"}
    assert {key: (tuple(t.shape), t.dtype) for key, t in cache.mm_outputs_cache.items()} == {
        "layer": ((NUM_BLOCKS, BLOCK_SIZE, MM_WIDTH), torch.float32),
        "codes": ((NUM_BLOCKS, BLOCK_SIZE, 2), torch.int64),
    }
    assert not any(storage.any() for storage in cache.mm_outputs_cache.values())
    cache.mm_outputs_cache["layer"].fill_(1)
    cache.maybe_init_missing_mm_cache_keys(outputs, seq_len)
    assert torch.all(cache.mm_outputs_cache["layer"] == 1)


def test_updated_rows_are_found_in_the_storage_at_their_slots() -> None:
    cache = new_cache()
    hidden, layer = torch.rand(8, HIDDEN_SIZE), torch.rand(8, MM_WIDTH)
    at = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7])
    cache.update_omni_tensor_prefix_cache(
        hidden_states=hidden, multimodal_outputs={"layer": layer}, num_tokens_unpadded=8, slot_mapping=at
    )
    assert torch.equal(cache.hidden_states_cache.view(-1, HIDDEN_SIZE)[at], hidden)
    assert torch.equal(cache.mm_outputs_cache["layer"].view(-1, MM_WIDTH)[at], layer)
    assert not cache.hidden_states_cache[0].any()


def test_padded_rows_are_neither_written_nor_in_the_way() -> None:
    cache = new_cache()
    hidden, layer, at = torch.rand(8, HIDDEN_SIZE), torch.rand(8, MM_WIDTH), slots(2, 3)
    cache.update_omni_tensor_prefix_cache(hidden, {"layer": layer}, 5, at, num_tokens_padded=8)
    assert torch.equal(cache.mm_outputs_cache["layer"].view(-1, MM_WIDTH)[at[:5]], layer[:5])
    assert not cache.mm_outputs_cache["layer"].view(-1, MM_WIDTH)[at[5:]].any()


def test_hidden_states_may_be_left_out() -> None:
    cache = new_cache()
    cache.update_omni_tensor_prefix_cache(None, {"layer": torch.ones(4, MM_WIDTH)}, 4, slots(1))
    assert not cache.hidden_states_cache.any()
    assert cache.mm_outputs_cache["layer"][1].all()


# Merging


def filled(blocks: tuple[int, ...]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A cache with rows in these blocks, and the rows."""
    cache, num_rows = new_cache(), len(blocks) * BLOCK_SIZE
    hidden, layer = torch.rand(num_rows, HIDDEN_SIZE), torch.rand(num_rows, MM_WIDTH)
    cache.update_omni_tensor_prefix_cache(hidden, {"layer": layer}, num_rows, slots(*blocks))
    return cache, hidden, layer


def test_a_hit_merges_with_a_patched_hook_and_a_batch_without_block_ids() -> None:
    cache, hidden, layer = filled((4, 7))
    cache.add_prefix_cached_new_req_id("req1")
    batch = batch_of("req1", "req2", computed=torch.Tensor([8, 0]))
    new_hidden, new_layer = torch.rand(5, HIDDEN_SIZE), torch.rand(5, MM_WIDTH)
    counts = {"req1": 3, "req2": 2}
    with patch(HOOK, return_value=[4, 7]) as hook:
        states = cache.get_merged_hidden_states(
            query_start_loc=[0, 3], input_batch=batch, hidden_states=new_hidden, num_scheduled_tokens=counts
        )
        outputs = cache.get_merged_multimodal_states(
            query_start_loc=[0, 3],
            input_batch=batch,
            multimodal_outputs={"layer": new_layer},
            num_scheduled_tokens=counts,
        )
    assert hook.call_count == 2
    assert torch.equal(states["req1"], torch.cat([hidden, new_hidden[:3]]))
    assert torch.equal(states["req2"], new_hidden[3:])
    assert torch.equal(outputs["layer"]["req1"], torch.cat([layer, new_layer[:3]]))
    assert torch.equal(outputs["layer"]["req2"], new_layer[3:])


@pytest.mark.parametrize("qsl", [[0, 3], torch.tensor([0, 3]), torch.tensor([0, 3, 5], dtype=torch.int32)])
def test_without_a_hit_the_hook_is_not_asked(qsl: Any) -> None:
    cache, _, _ = filled((4, 7))
    new_hidden = torch.rand(5, HIDDEN_SIZE)
    batch = batch_of("req1", "req2", computed=torch.Tensor([8, 0]))
    with patch(HOOK) as hook:
        states = cache.get_merged_hidden_states(qsl, batch, new_hidden, {"req1": 3, "req2": 2})
    hook.assert_not_called()
    assert torch.equal(states["req1"], new_hidden[:3])
    assert torch.equal(states["req2"], new_hidden[3:])


def test_marks_live_for_a_step() -> None:
    cache = new_cache()
    assert not cache.has_prefix_cached_new_req_ids()
    cache.add_prefix_cached_new_req_id("req1")
    assert cache.has_prefix_cached_new_req_ids()
    cache.reset_prefix_cached_new_req_ids()
    assert not cache.has_prefix_cached_new_req_ids()


def test_the_hook_reads_the_first_group_of_a_table() -> None:
    batch = batch_of("a", "b", computed=torch.Tensor([8, 4]), tables=[[5, 2, 9], [3, 1, 0]])
    cache = new_cache()
    assert [list(map(int, cache._get_cached_block_ids(row, batch))) for row in (0, 1)] == [[5, 2], [3]]


# Staged hidden states


def test_a_staged_copy_is_written_and_merged_in_place_of_the_live_tensor() -> None:
    cache = new_cache()
    live, staged = torch.zeros(4, HIDDEN_SIZE), torch.rand(4, HIDDEN_SIZE)
    cache.update_omni_tensor_prefix_cache(live, None, 4, slots(1), hidden_states_cpu=staged)
    assert torch.equal(cache.hidden_states_cache[1], staged)
    batch = batch_of("req1", computed=torch.Tensor([0]))
    states = cache.get_merged_hidden_states([0], batch, live, {"req1": 4}, hidden_states_cpu=staged)
    assert torch.equal(states["req1"], staged)


@pytest.mark.parametrize(
    "staged",
    [
        torch.zeros(4, HIDDEN_SIZE, dtype=torch.float64),
        torch.zeros(4, HIDDEN_SIZE + 1),
        torch.zeros(3, HIDDEN_SIZE),
        torch.zeros(HIDDEN_SIZE, 4).t(),
        torch.zeros(4, HIDDEN_SIZE, device="meta"),
    ],
    ids=["dtype", "width", "rows", "strides", "device"],
)
def test_a_staged_copy_that_does_not_fit_raises_a_runtime_error(staged: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"hidden_states_cpu.*expected.*found"):
        new_cache().update_omni_tensor_prefix_cache(
            torch.zeros(4, HIDDEN_SIZE), None, 4, slots(1), hidden_states_cpu=staged
        )


# Deferred outputs


def test_skipped_rows_are_staged_twice_and_written_at_the_end() -> None:
    cache, codes = new_cache(), torch.arange(1, 16).view(5, 3)
    cache.update_omni_tensor_prefix_cache(None, {"codes": codes[:4]}, 4, slots(6), skip_mm_cache_keys={"codes"})
    assert "codes" in cache.mm_cache_keys
    assert not cache.mm_outputs_cache["codes"].any()

    batch = batch_of("req1", computed=torch.Tensor([4]), tables=[[6, 2]])
    cache.stage_deferred_mm_outputs([0], batch, {"codes": codes[:4]}, {"req1": 4}, {"codes"})
    batch.num_computed_tokens_cpu = torch.Tensor([5])
    cache.stage_deferred_mm_outputs([0], batch, {"codes": codes[4:]}, {"req1": 1}, {"codes"})
    assert not cache.mm_outputs_cache["codes"].any()

    cache.commit_deferred_mm_outputs({"req1"}, batch)
    assert torch.equal(cache.mm_outputs_cache["codes"][6], codes[:4])
    assert torch.equal(cache.mm_outputs_cache["codes"][2, 0], codes[4])
    assert not cache.mm_outputs_cache["codes"][2, 1:].any()


def stage_four(cache: Any, codes: torch.Tensor, block: int) -> Any:
    batch = batch_of("req1", computed=torch.Tensor([4]), tables=[[block]])
    cache.stage_deferred_mm_outputs([0, 4], batch, {"codes": codes}, {"req1": 4}, {"codes"})
    return batch


def test_a_commit_after_a_discard_does_nothing() -> None:
    cache = new_cache()
    batch = stage_four(cache, torch.ones(4, 2), block=3)
    assert "req1" in cache._deferred_mm_outputs
    cache.discard_deferred_mm_outputs("req1")
    assert "req1" not in cache._deferred_mm_outputs
    cache.commit_deferred_mm_outputs({"req1"}, batch)
    assert not cache.mm_outputs_cache["codes"].any()


def test_after_a_discard_the_id_may_be_used_again() -> None:
    cache = new_cache()
    stage_four(cache, torch.full((4, 2), 7), block=3)
    cache.discard_deferred_mm_outputs("req1")
    batch = stage_four(cache, torch.full((4, 2), 9), block=5)
    cache.commit_deferred_mm_outputs({"req1"}, batch)
    assert "req1" not in cache._deferred_mm_outputs
    assert not cache.mm_outputs_cache["codes"][3].any()
    assert (cache.mm_outputs_cache["codes"][5] == 9).all()


def test_a_key_that_only_ever_was_staged_and_committed_is_hit_by_one_new_token() -> None:
    cache, codes = new_cache(), torch.arange(1, 9).view(4, 2)
    cache.commit_deferred_mm_outputs({"req1"}, stage_four(cache, codes, block=3))
    cache.reset_prefix_cached_new_req_ids()
    cache.add_prefix_cached_new_req_id("req2")
    batch = batch_of("req2", computed=torch.Tensor([4]), tables=[[3, 8]])
    new = torch.tensor([[50, 51]])
    merged = cache.get_merged_multimodal_states([0], batch, {"codes": new}, {"req2": 1})
    assert torch.equal(merged["codes"]["req2"], torch.cat([codes, new]))


def test_what_is_staged_is_detached_from_the_model_s_buffer() -> None:
    cache, codes = new_cache(), torch.ones(4, 2, requires_grad=True)
    batch = stage_four(cache, codes, block=3)
    codes.data.zero_()
    cache.commit_deferred_mm_outputs({"req1"}, batch)
    assert cache.mm_outputs_cache["codes"][3].all()


# Pass-through


def passed(value: Any) -> dict[str, Any]:
    """What two requests of 2 and 3 tokens get of a value."""
    batch = batch_of("req1", "req2", computed=torch.Tensor([0, 0]))
    merged = new_cache().get_merged_multimodal_states([0, 2], batch, {"v": value}, {"req1": 2, "req2": 3})
    return dict(merged["v"])


def test_strings_and_numbers_pass_as_they_are() -> None:
    assert passed("text") == {"req1": "text", "req2": "text"}
    assert passed(24000) == {"req1": 24000, "req2": 24000}


def test_a_list_of_strings_passes_whole() -> None:
    assert passed(["a", "b"]) == {"req1": ["a", "b"], "req2": ["a", "b"]}


def test_a_list_of_tensors_in_a_dict_passes_whole_to_each_as_clones() -> None:
    ref = [torch.rand(3), torch.rand(2, 2)]
    codes = {who: part["ref"] for who, part in passed({"ref": ref}).items()}
    for mine in codes.values():
        assert all(torch.equal(one, other) for one, other in zip(mine, ref, strict=True))
        assert all(one.data_ptr() != other.data_ptr() for one, other in zip(mine, ref, strict=True))
    assert codes["req1"][0].data_ptr() != codes["req2"][0].data_ptr()


def test_metadata_of_one_dimension_in_a_dict_are_cut_to_each_request() -> None:
    parts = passed({"len": torch.tensor([7, 7, 9, 9, 9]), "streaming": torch.tensor([True, True, False, False, False])})
    assert {who: part["len"].tolist() for who, part in parts.items()} == {"req1": [7, 7], "req2": [9, 9, 9]}
    assert {who: part["streaming"].tolist() for who, part in parts.items()} == {
        "req1": [True, True],
        "req2": [False, False, False],
    }


def test_a_tensor_whose_first_dimension_is_not_the_count_is_cloned_to_each() -> None:
    value = torch.rand(4, 2)
    parts = passed(value)
    assert all(torch.equal(part, value) for part in parts.values())
    assert len({value.data_ptr(), *(part.data_ptr() for part in parts.values())}) == 3


def test_outputs_of_none_are_an_empty_result() -> None:
    batch = batch_of("req1", computed=torch.Tensor([0]))
    assert new_cache().get_merged_multimodal_states([0], batch, None, {"req1": 2}) == {}


def test_cached_and_passed_values_come_side_by_side() -> None:
    cache, _, layer = filled((4,))
    cache.add_prefix_cached_new_req_id("req1")
    new = torch.rand(2, MM_WIDTH)
    outputs = {"layer": new, "sr": torch.tensor(24000), "meta": {"kind": "audio"}}
    with patch(HOOK, return_value=torch.tensor([4])):
        merged = cache.get_merged_multimodal_states([0], batch_of("req1", computed=[4]), outputs, {"req1": 2})
    assert torch.equal(merged["layer"]["req1"], torch.cat([layer, new]))
    assert merged["sr"]["req1"].item() == 24000
    assert merged["meta"]["req1"] == {"kind": "audio"}
