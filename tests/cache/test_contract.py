"""The contract of the cache, line by line, in the order in which it is written down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omnisim.cache import (
    KeyKind,
    ModelPolicy,
    OmniTensorPrefixCache,
    PrefixCacheError,
    build_mm_cpu,
    to_payload_element,
)
from omnisim.cache.errors import CacheMemoryExceeded, RowFormChanged, StagedCopyMismatch

from .batches import HIDDEN, Request, batch, names, play, rows, scheduled, starts

NUM_BLOCKS, BLOCK_SIZE, WIDTH = 6, 4, 2

A = Request("A", 0, 4, (1,), "new", "A")
B = Request("B", 4, 2, (1, 3), "new", "B")
SLOTS_OF_A = torch.tensor([4, 5, 6, 7])


def new_cache(**options: Any) -> OmniTensorPrefixCache:
    return OmniTensorPrefixCache(NUM_BLOCKS, BLOCK_SIZE, WIDTH, torch.float32, **options)


def after_a(**options: Any) -> OmniTensorPrefixCache:
    """A cache that has block 1 from A, hidden rows and key K."""
    cache = new_cache(**options)
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), {"K": rows("A", 0, 4, key="K")}, 4, SLOTS_OF_A)
    return cache


def k_rows(owner: str, start: int, stop: int) -> dict[str, Tensor]:
    return {"K": rows(owner, start, stop, key="K")}


def flat(storage: Tensor) -> Tensor:
    return storage.view(-1, *storage.shape[2:])


# Class and state


def test_the_constructor_s_values_are_attributes() -> None:
    cache = new_cache()
    assert (cache.num_blocks, cache.block_size, cache.default_hidden_size) == (NUM_BLOCKS, BLOCK_SIZE, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_storage_is_there_at_once_in_its_dtype_on_the_cpu_and_zero(dtype: torch.dtype) -> None:
    storage = OmniTensorPrefixCache(NUM_BLOCKS, BLOCK_SIZE, WIDTH, dtype).hidden_states_cache
    assert (storage.shape, storage.dtype, storage.device.type) == ((NUM_BLOCKS, BLOCK_SIZE, WIDTH), dtype, "cpu")
    assert not storage.any()


def test_no_multimodal_key_is_open_at_first() -> None:
    assert new_cache().mm_outputs_cache == {}
    assert new_cache().mm_cache_keys == set()


# maybe_init_missing_mm_cache_keys

OPENED = {
    "a row a token": (torch.zeros(8, 3), (3,)),
    "rank 3": (torch.zeros(8, 3, 2), (3, 2)),
    "rank 4": (torch.zeros(8, 3, 2, 1), (3, 2, 1)),
    "int64": (torch.zeros(8, 16, dtype=torch.int64), (16,)),
    "bool": (torch.zeros(8, 3, dtype=torch.bool), (3,)),
    "bfloat16": (torch.zeros(8, 3, dtype=torch.bfloat16), (3,)),
    "uint8": (torch.zeros(8, 5, dtype=torch.uint8), (5,)),
}


@pytest.mark.parametrize("what", OPENED)
def test_a_tensor_of_the_padded_count_is_opened_in_its_own_dtype_and_shape(what: str) -> None:
    value, shape = OPENED[what]
    cache = new_cache()
    cache.maybe_init_missing_mm_cache_keys({"K": value}, 8)
    assert cache.mm_cache_keys == set(cache.mm_outputs_cache) == {"K"}
    storage = cache.mm_outputs_cache["K"]
    assert (storage.shape, storage.dtype, storage.device.type) == ((NUM_BLOCKS, BLOCK_SIZE, *shape), value.dtype, "cpu")
    assert not storage.any()


@pytest.mark.parametrize(
    "value",
    [torch.zeros(8), torch.tensor(1), torch.zeros(5, 3), torch.zeros(1, 8), [torch.zeros(8, 3)], "text", None, 7, {}],
    ids=["1-D metadata", "0-dim", "other count", "count in a later dimension", "list", "string", "None", "int", "dict"],
)
def test_nothing_else_is_opened(value: Any) -> None:
    cache = new_cache()
    cache.maybe_init_missing_mm_cache_keys({"K": value}, 8)
    assert not cache.mm_cache_keys


def test_a_second_opening_changes_nothing() -> None:
    cache = new_cache()
    cache.maybe_init_missing_mm_cache_keys({"K": torch.zeros(8, 3)}, 8)
    storage = cache.mm_outputs_cache["K"]
    storage.fill_(7)
    cache.maybe_init_missing_mm_cache_keys({"K": torch.zeros(8, 5, dtype=torch.int64), "L": torch.zeros(8, 1)}, 8)
    assert cache.mm_outputs_cache["K"] is storage
    assert (storage == 7).all()
    assert cache.mm_cache_keys == {"K", "L"}


def test_a_declared_kind_goes_before_the_shape() -> None:
    kinds = {"row": KeyKind.ROW, "row1d": KeyKind.ROW, "request": KeyKind.REQUEST, "decode": KeyKind.DECODE_ROW}
    cache = new_cache(policy=ModelPolicy(kinds=kinds))
    values = {"row": torch.zeros(5, 3), "row1d": torch.zeros(8), "request": torch.zeros(8, 3)}
    cache.maybe_init_missing_mm_cache_keys(values | {"decode": torch.zeros(8, 3)}, 8)
    assert cache.mm_cache_keys == {"row"}


# Marks


def test_marks_are_added_asked_for_and_reset() -> None:
    cache = new_cache()
    assert cache.has_prefix_cached_new_req_ids() is False
    cache.add_prefix_cached_new_req_id("A")
    cache.add_prefix_cached_new_req_id("B")
    assert cache.has_prefix_cached_new_req_ids() is True
    cache.reset_prefix_cached_new_req_ids()
    assert cache.has_prefix_cached_new_req_ids() is False


# update_omni_tensor_prefix_cache


def test_an_update_writes_the_first_unpadded_rows_at_their_slots() -> None:
    cache = new_cache()
    hidden, outputs, slots = rows("A", 0, 8), k_rows("A", 0, 8), torch.tensor([4, 5, 20, 9, 0, 1, 2, 3])
    cache.update_omni_tensor_prefix_cache(hidden, outputs, 4, slots, 8)
    for storage, key in ((cache.hidden_states_cache, HIDDEN), (cache.mm_outputs_cache["K"], "K")):
        assert names(flat(storage)[slots[:4]], key) == "A.0..3"
        assert not flat(storage)[:4].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_slot_mapping_may_be_of_either_integer_width(dtype: torch.dtype) -> None:
    cache = new_cache()
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), None, 4, SLOTS_OF_A.to(dtype))
    assert names(cache.hidden_states_cache[1]) == "A.0..3"


def test_either_tensor_argument_may_be_none() -> None:
    cache = new_cache()
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), None, 4, SLOTS_OF_A)
    assert not cache.mm_cache_keys
    cache.update_omni_tensor_prefix_cache(None, k_rows("A", 0, 4), 4, SLOTS_OF_A)
    assert names(cache.mm_outputs_cache["K"][1], "K") == "A.0..3"
    assert names(cache.hidden_states_cache[1]) == "A.0..3"
    cache.update_omni_tensor_prefix_cache(None, None, 4, SLOTS_OF_A)


def test_hidden_rows_and_outputs_may_be_written_by_two_calls_of_one_step() -> None:
    cache = new_cache()
    cache.reset_prefix_cached_new_req_ids()
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), None, 4, SLOTS_OF_A)
    cache.update_omni_tensor_prefix_cache(None, k_rows("A", 0, 4), 4, SLOTS_OF_A)
    assert hit(cache) == ("A.0..3 B.4..5", "A.0..3 B.4..5")


def hit(cache: OmniTensorPrefixCache) -> tuple[str, str]:
    """What B gets, which hits block 1: names of its hidden rows and of its rows of K."""
    cache.reset_prefix_cached_new_req_ids()
    cache.add_prefix_cached_new_req_id("B")
    hidden, outputs, counts = rows("B", 4, 6), k_rows("B", 4, 6), scheduled([B])
    cache.update_omni_tensor_prefix_cache(hidden, outputs, 2, torch.tensor([12, 13]))
    merged = cache.get_merged_hidden_states([0, 2], batch([B]), hidden, counts)["B"]
    return names(merged), names(cache.get_merged_multimodal_states([0, 2], batch([B]), outputs, counts)["K"]["B"], "K")


def test_a_skipped_key_is_opened_and_not_written() -> None:
    cache = new_cache()
    outputs = k_rows("A", 0, 4) | {"L": torch.ones(4, 3)}
    cache.update_omni_tensor_prefix_cache(None, outputs, 4, SLOTS_OF_A, skip_mm_cache_keys={"K"})
    assert cache.mm_cache_keys == {"K", "L"}
    assert not cache.mm_outputs_cache["K"].any()
    assert cache.mm_outputs_cache["L"][1].all()


def test_skipped_keys_may_be_any_collection_and_name_keys_that_are_not_there() -> None:
    for skipped in ({"K", "x"}, ["K", "x"], ("K", "x"), frozenset({"K", "x"})):
        cache = new_cache()
        cache.update_omni_tensor_prefix_cache(None, k_rows("A", 0, 4), 4, SLOTS_OF_A, skip_mm_cache_keys=skipped)
        assert not cache.mm_outputs_cache["K"].any()


def test_a_staged_copy_is_the_only_source() -> None:
    cache, live = new_cache(), torch.full((4, WIDTH), float("nan"))
    staged = rows("A", 0, 6)
    cache.update_omni_tensor_prefix_cache(live, None, 4, SLOTS_OF_A, hidden_states_cpu=staged)
    assert names(cache.hidden_states_cache[1]) == "A.0..3"
    merged = cache.get_merged_hidden_states([0, 4], batch([A]), live, scheduled([A]), hidden_states_cpu=staged)
    assert names(merged["A"]) == "A.0..3"
    staged.zero_()
    assert names(merged["A"]) == "A.0..3"


WRONG_COPIES = {
    "not contiguous": (torch.zeros(WIDTH, 4).t(), "a strided torch.float32 tensor of shape [4, 2] on cpu"),
    "another dtype": (torch.zeros(4, WIDTH).half(), "a contiguous torch.float16 tensor of shape [4, 2] on cpu"),
    "another width": (torch.zeros(4, 3), "a contiguous torch.float32 tensor of shape [4, 3] on cpu"),
    "another rank": (torch.zeros(4), "a contiguous torch.float32 tensor of shape [4] on cpu"),
    "a number": (torch.tensor(1.0), "a contiguous torch.float32 tensor of shape [] on cpu"),
    "too few rows": (torch.zeros(3, WIDTH), "a contiguous torch.float32 tensor of shape [3, 2] on cpu"),
    "another device": (
        torch.zeros(4, WIDTH, device="meta"),
        "a contiguous torch.float32 tensor of shape [4, 2] on meta",
    ),
}


@pytest.mark.parametrize("what", WRONG_COPIES)
@pytest.mark.parametrize("method", ["update", "merge"])
def test_a_staged_copy_that_is_none_is_refused_with_what_was_got_and_expected(what: str, method: str) -> None:
    staged, found = WRONG_COPIES[what]
    cache, live = new_cache(), rows("A", 0, 4)
    call: dict[str, Callable[[], object]] = {
        "update": lambda: cache.update_omni_tensor_prefix_cache(live, None, 4, SLOTS_OF_A, hidden_states_cpu=staged),
        "merge": lambda: cache.get_merged_hidden_states([0], batch([A]), live, {"A": 4}, hidden_states_cpu=staged),
    }
    with pytest.raises(RuntimeError) as caught:
        call[method]()
    assert isinstance(caught.value, StagedCopyMismatch)
    expected = "at least 4 contiguous torch.float32 rows of shape [2] on cpu"
    assert str(caught.value) == f"key 'hidden_states_cpu', step -1: expected {expected}, found {found}"
    assert not cache.hidden_states_cache.any()


# get_merged_hidden_states


def test_a_marked_hit_gets_its_cached_rows_and_then_this_step_s() -> None:
    assert hit(after_a()) == ("A.0..3 B.4..5", "A.0..3 B.4..5")


def test_a_mark_on_a_request_without_computed_tokens_adds_nothing() -> None:
    cache = after_a()
    cache.add_prefix_cached_new_req_id("C")
    fresh = Request("C", 0, 2, (2,))
    assert names(cache.get_merged_hidden_states([0], batch([fresh]), rows("C", 0, 2), {"C": 2})["C"]) == "C.0..1"


def test_every_other_request_gets_this_step_s_rows_alone() -> None:
    cache = after_a()
    merged = cache.get_merged_hidden_states([0, 2], batch([B]), rows("B", 4, 6), scheduled([B]))
    assert names(merged["B"]) == "B.4..5"


def test_hits_and_misses_share_a_batch_in_any_order() -> None:
    _, deliveries = play(
        "new A c=0 n=4 [1]; new C c=0 n=3 [2] \n run C c=3 n=1 [2]; new B c=4 n=2 [1,3]; run A c=4 n=1 [1,4] \n"
        "run A c=5 n=1 [1,4]; new D c=4 n=1 [2,5]; new E c=4 n=1 [1,6]; run C c=4 n=2 [2,7]"
    )
    assert {who: deliveries[1].of(who) for who in "CBA"} == {"C": "C.3", "B": "A.0..3 B.4..5", "A": "A.4"}
    want = {"A": "A.5", "D": "C.0..3 D.4", "E": "A.0..3 E.4", "C": "C.4..5"}
    assert {who: deliveries[2].of(who) for who in "ADEC"} == want
    assert {who: deliveries[2].of(who, "K") for who in "ADEC"} == want


@pytest.mark.parametrize("num_computed", [1, 2, 3, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_hit_of_any_length_gets_a_row_a_position(num_computed: int, block_size: int) -> None:
    blocks = [11, 2, 9, 4, 7, 6, 5, 8, 3, 10, 1]
    of_a, shared = (blocks[: -(-num // block_size)] for num in (11, num_computed))
    of_b = shared if num_computed % block_size else [*shared, 0]
    story = f"new A c=0 n=11 {of_a} \n fin A; new B c={num_computed} n=1 {of_b}".replace(", ", ",")
    _, deliveries = play(story, block_size=block_size)
    cached = "A.0" if num_computed == 1 else f"A.0..{num_computed - 1}"
    assert deliveries[-1].of("B") == deliveries[-1].of("B", "K") == f"{cached} B.{num_computed}"


def test_delivered_rows_are_contiguous_on_the_cpu_in_their_dtype_and_nobody_s_view() -> None:
    _, deliveries = play("new A c=0 n=4 [1]; new C c=0 n=2 [2] \n run C c=2 n=1 [2]; new B c=4 n=2 [1,3]")
    for delivery in deliveries:
        assert not delivery.changed_since
        for value in delivery.tensors():
            assert value.is_contiguous()
            assert (value.dtype, value.device.type, value.requires_grad) == (torch.float32, "cpu", False)


def test_rows_that_carry_a_gradient_or_strides_are_delivered_as_plain_rows() -> None:
    cache = new_cache()
    hidden = rows("A", 0, 4).t().contiguous().t().requires_grad_()
    outputs = {"K": rows("A", 0, 4, key="K", shape=(2, 3)).permute(2, 1, 0).contiguous().permute(2, 1, 0)}
    cache.update_omni_tensor_prefix_cache(hidden, outputs, 4, SLOTS_OF_A)
    merged = cache.get_merged_hidden_states([0], batch([A]), hidden, {"A": 4})["A"]
    merged_k = cache.get_merged_multimodal_states([0], batch([A]), outputs, {"A": 4})["K"]["A"]
    assert names(merged) == names(merged_k, "K") == names(cache.hidden_states_cache[1]) == "A.0..3"
    assert names(cache.mm_outputs_cache["K"][1], "K") == "A.0..3"
    assert merged.is_contiguous()
    assert merged_k.is_contiguous()
    assert not merged.requires_grad


# get_merged_multimodal_states


def test_outputs_of_none_give_an_empty_result() -> None:
    assert after_a().get_merged_multimodal_states([0], batch([B]), None, scheduled([B])) == {}
    assert after_a().get_merged_multimodal_states([0], batch([B]), {}, scheduled([B])) == {}


def test_a_cached_name_that_is_not_in_this_step_is_not_in_the_result() -> None:
    merged = after_a().get_merged_multimodal_states([0], batch([B]), {"other": "x"}, scheduled([B]))
    assert merged == {"other": {"B": "x"}}


def test_the_result_is_name_to_request_to_value() -> None:
    requests = [Request("A", 4, 1, (1, 2)), B]
    cache = after_a()
    cache.add_prefix_cached_new_req_id("B")
    outputs = {"K": torch.cat([rows("A", 4, 5, key="K"), rows("B", 4, 6, key="K")]), "sr": torch.tensor(24000)}
    merged = cache.get_merged_multimodal_states(starts(requests), batch(requests), outputs, scheduled(requests))
    assert set(merged) == {"K", "sr"}
    assert {who: names(part, "K") for who, part in merged["K"].items()} == {"A": "A.4", "B": "A.0..3 B.4..5"}
    assert {who: part.item() for who, part in merged["sr"].items()} == {"A": 24000, "B": 24000}


# Deferred rows


def staged(cache: OmniTensorPrefixCache, request: Request, counted: int) -> Tensor:
    """Stage K of one request, whose batch counts ``counted`` computed tokens; the live buffer comes back."""
    outputs = {"K": rows(request.id, counted - request.num_new, counted, key="K")}
    cache.stage_deferred_mm_outputs([0], batch([request], [counted]), outputs, scheduled([request]), {"K"})
    return outputs["K"]


def test_a_chunk_of_n_rows_starts_at_computed_minus_n_and_is_written_through_the_block_table() -> None:
    cache = new_cache()
    staged(cache, Request("A", 0, 3, (2, 5)), counted=3)
    staged(cache, Request("A", 3, 2, (2, 5)), counted=5)
    assert not cache.mm_outputs_cache["K"].any()
    cache.commit_deferred_mm_outputs({"A"}, batch([Request("A", 5, 0, (2, 5))]))
    assert names(cache.mm_outputs_cache["K"][2], "K") == "A.0..3"
    assert names(cache.mm_outputs_cache["K"][5, :2], "K") == "A.4 zero"
    assert cache.deferred_req_ids == set()


def test_a_chunk_is_no_view_of_the_live_buffer_and_carries_no_gradient() -> None:
    cache = new_cache()
    staged(cache, A, counted=4).fill_(-2)
    cache.commit_deferred_mm_outputs({"A"}, batch([A]))
    assert names(cache.mm_outputs_cache["K"][1], "K") == "A.0..3"
    assert not cache.mm_outputs_cache["K"].requires_grad


def test_only_finished_requests_are_committed_and_others_may_be_named() -> None:
    cache = new_cache()
    requests = [Request("A", 4, 4, (1,)), Request("B", 3, 3, (2,))]
    outputs = {"K": torch.cat([rows("A", 0, 4, key="K"), rows("B", 0, 3, key="K")])}
    cache.stage_deferred_mm_outputs([0, 4, 7], batch(requests), outputs, scheduled(requests), ["K", "absent"])
    assert cache.deferred_req_ids == {"A", "B"}
    cache.commit_deferred_mm_outputs(["B", "nobody"], batch(requests))
    assert names(cache.mm_outputs_cache["K"][2], "K") == "B.0..2 zero"
    assert not cache.mm_outputs_cache["K"][1].any()
    assert cache.deferred_req_ids == {"A"}


def test_a_commit_may_come_after_the_request_left_the_batch() -> None:
    cache = new_cache()
    staged(cache, A, counted=4)
    cache.commit_deferred_mm_outputs({"A"}, batch([]))
    assert names(cache.mm_outputs_cache["K"][1], "K") == "A.0..3"


def test_discarded_rows_are_never_written() -> None:
    cache = new_cache()
    staged(cache, A, counted=4)
    cache.discard_deferred_mm_outputs("A")
    cache.discard_deferred_mm_outputs("nobody")
    cache.commit_deferred_mm_outputs({"A"}, batch([A]))
    assert not cache.mm_outputs_cache["K"].any()


def test_a_discarded_chunk_of_a_slot_that_has_a_new_tenant_changes_nothing() -> None:
    cache = new_cache()
    staged(cache, A, counted=4)
    cache.update_omni_tensor_prefix_cache(rows("C", 0, 4), k_rows("C", 0, 4), 4, SLOTS_OF_A)
    cache.discard_deferred_mm_outputs("A")
    assert hit(cache) == ("C.0..3 B.4..5", "C.0..3 B.4..5")


def test_a_late_commit_never_overwrites_the_new_tenant_of_a_slot() -> None:
    cache = new_cache()
    staged(cache, A, counted=4)
    cache.update_omni_tensor_prefix_cache(rows("C", 0, 2), k_rows("C", 0, 2), 2, SLOTS_OF_A[:2])
    cache.commit_deferred_mm_outputs({"A"}, batch([A]))
    assert names(cache.mm_outputs_cache["K"][1], "K") == "C.0..1 A.2..3"


def test_outputs_of_none_and_values_that_are_no_rows_are_not_staged() -> None:
    cache = new_cache()
    for outputs in (None, {}, {"K": None}, {"K": torch.zeros(4)}, {"K": [torch.zeros(4, 2)]}):
        cache.stage_deferred_mm_outputs([0], batch([A], [4]), outputs, scheduled([A]), {"K"})
    assert cache.deferred_req_ids == set()


# The hook


def test_the_hook_names_the_blocks_behind_the_computed_tokens() -> None:
    requests = [Request("A", 9, 1, (1, 4, 2, 5)), Request("B", 8, 1, (3, 5, 0))]
    blocks = [list(map(int, new_cache()._get_cached_block_ids(row, batch(requests)))) for row in (0, 1)]
    assert blocks == [[1, 4, 2], [3, 5]]


@pytest.mark.parametrize("ids", [[1], (1,), np.array([1]), torch.tensor([1]), torch.tensor([1], dtype=torch.int32)])
def test_the_hook_may_be_patched_to_give_any_sequence(ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OmniTensorPrefixCache, "_get_cached_block_ids", lambda self, req_idx, input_batch: ids)
    cache = after_a()
    cache.add_prefix_cached_new_req_id("B")
    merged = cache.get_merged_hidden_states([0], batch([B]), rows("B", 4, 6), scheduled([B]))
    assert names(merged["B"]) == "A.0..3 B.4..5"


# What callers may pass

FORMS_OF_QSL: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "NumPy int32": lambda at: np.array(at, dtype=np.int32),
    "NumPy int64": lambda at: np.array(at, dtype=np.int64),
    "tensor int32": lambda at: torch.tensor(at, dtype=torch.int32),
    "tensor int64": torch.tensor,
    "list of tensors": lambda at: [torch.tensor(start) for start in at],
}


@pytest.mark.parametrize("has_last", [True, False], ids=["with its last entry", "without"])
@pytest.mark.parametrize("form", FORMS_OF_QSL)
def test_query_start_loc_may_come_in_any_form(form: str, has_last: bool) -> None:
    requests = [Request("A", 4, 1, (1, 2)), B]
    at = FORMS_OF_QSL[form]([0, 1, 3] if has_last else [0, 1])
    cache = after_a()
    cache.add_prefix_cached_new_req_id("B")
    hidden = torch.cat([rows("A", 4, 5), rows("B", 4, 6)])
    merged = cache.get_merged_hidden_states(at, batch(requests), hidden, scheduled(requests))
    assert {who: names(part) for who, part in merged.items()} == {"A": "A.4", "B": "A.0..3 B.4..5"}
    outputs = {"K": torch.cat([rows("A", 4, 5, key="K"), rows("B", 4, 6, key="K")])}
    cache.stage_deferred_mm_outputs(at, batch(requests, [5, 6]), outputs, scheduled(requests), {"K"})
    merged_k = cache.get_merged_multimodal_states(at, batch(requests), outputs, scheduled(requests))["K"]
    assert names(merged_k["B"], "K") == "A.0..3 B.4..5"


FORMS_OF_COUNTS: dict[str, Callable[[list[int]], Any]] = {
    "NumPy int32": lambda n: np.array(n, dtype=np.int32),
    "NumPy float": lambda n: np.array(n, dtype=np.float64),
    "tensor int32": lambda n: torch.tensor(n, dtype=torch.int32),
    "tensor int64": torch.tensor,
    "tensor float": torch.Tensor,
}


@pytest.mark.parametrize("form", FORMS_OF_COUNTS)
def test_counts_of_computed_tokens_may_be_arrays_or_tensors_of_integers_or_floats(form: str) -> None:
    counts = FORMS_OF_COUNTS[form]
    cache = new_cache()
    outputs = k_rows("A", 0, 4)
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), None, 4, SLOTS_OF_A)
    cache.stage_deferred_mm_outputs([0], batch([A], counts([4])), outputs, scheduled([A]), {"K"})
    cache.commit_deferred_mm_outputs({"A"}, batch([A], counts([4])))
    cache.add_prefix_cached_new_req_id("B")
    merged = cache.get_merged_hidden_states([0], batch([B], counts([4])), rows("B", 4, 6), scheduled([B]))
    merged_k = cache.get_merged_multimodal_states([0], batch([B], counts([4])), k_rows("B", 4, 6), scheduled([B]))["K"]
    assert names(merged["B"]) == names(merged_k["B"], "K") == "A.0..3 B.4..5"


def test_the_row_of_a_request_is_looked_up_and_not_counted() -> None:
    """``req_ids`` may be in another order than the rows of the table."""
    requests = [Request("A", 4, 1, (1, 2)), B]
    input_batch = batch(requests)
    input_batch.req_ids = ["B", "A"]
    cache = after_a()
    cache.add_prefix_cached_new_req_id("B")
    hidden = torch.cat([rows("A", 4, 5), rows("B", 4, 6)])
    merged = cache.get_merged_hidden_states([0, 1, 3], input_batch, hidden, scheduled(requests))
    assert {who: names(part) for who, part in merged.items()} == {"A": "A.4", "B": "A.0..3 B.4..5"}


def test_an_empty_batch_gives_empty_results() -> None:
    cache = after_a()
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 0), k_rows("A", 0, 0), 0, SLOTS_OF_A[:0])
    assert cache.get_merged_hidden_states([0], batch([]), rows("A", 0, 0), {}) == {}
    assert cache.get_merged_multimodal_states([0], batch([]), k_rows("A", 0, 0), {}) == {"K": {}}


def test_the_first_of_several_groups_is_used_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="omnisim.cache.prefix_cache"):
        _, deliveries = play(
            "new A c=0 n=4 [1] \n new B c=4 n=1 [1,3] \n new C c=4 n=1 [1,4]", other_groups=[[9, 9], [8, 8]]
        )
    assert deliveries[-1].of("C") == "A.0..3 C.4"
    assert caplog.messages == ["3 KV-cache groups: rows are cached by the first group's blocks only"]


# Pass-through


def test_every_tensor_is_moved_once_and_dicts_and_lists_are_walked() -> None:
    live = torch.ones(2, 3, requires_grad=True)
    moved = build_mm_cpu({"t": live, "d": {"x": live, "y": [live]}, "l": [live, [live], "s"], "none": None, "s": "s"})
    tensors = [moved["t"], moved["d"]["x"], moved["d"]["y"][0], moved["l"][0], moved["l"][1][0]]
    for value in tensors:
        assert (value.device.type, value.requires_grad, value.is_contiguous()) == ("cpu", False, True)
    assert moved["l"][2] == moved["s"] == "s"
    assert "none" not in moved
    assert build_mm_cpu(None) == build_mm_cpu({}) == {}


def test_what_is_not_contiguous_is_once_it_was_moved() -> None:
    assert build_mm_cpu({"t": torch.zeros(3, 2).t()})["t"].is_contiguous()


def element(value: Any, **options: Any) -> Any:
    """What request 1, tokens [2, 5) of 5, gets."""
    return to_payload_element(value, 1, 2, 5, **({"seq_len": 5} | options))


PER_TOKEN = torch.arange(10).view(5, 2)
OTHER = torch.arange(3)


def test_a_tensor_of_the_scheduled_count_is_cut_to_the_request_s_span() -> None:
    assert element(PER_TOKEN).tolist() == [[4, 5], [6, 7], [8, 9]]
    assert element(torch.arange(5)).tolist() == [2, 3, 4]


def test_any_other_tensor_is_cloned() -> None:
    for value in (OTHER, torch.tensor(24000), torch.zeros(3, 5)):
        got = element(value)
        assert torch.equal(got, value)
        assert got.data_ptr() != value.data_ptr()


def test_a_cut_is_no_view() -> None:
    assert element(PER_TOKEN).untyped_storage().data_ptr() != PER_TOKEN.untyped_storage().data_ptr()


def test_a_dict_is_walked() -> None:
    got = element({"rows": PER_TOKEN, "inner": {"other": OTHER, "text": "x"}})
    assert got["rows"].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert (got["inner"]["other"].tolist(), got["inner"]["text"]) == ([0, 1, 2], "x")


def test_a_list_is_passed_whole_with_its_tensors_cloned() -> None:
    value = [PER_TOKEN, OTHER, "text", [OTHER], {"x": OTHER}]
    got = element(value, pass_lists_through=True)
    assert torch.equal(got[0], PER_TOKEN)
    assert got[2] == "text"
    for mine, theirs in ((got[0], PER_TOKEN), (got[1], OTHER), (got[3][0], OTHER), (got[4]["x"], OTHER)):
        assert mine.data_ptr() != theirs.data_ptr()


def test_without_a_cache_a_list_gives_the_request_s_own_element_or_else_the_first() -> None:
    assert element(["a", "b", "c"]) == "b"
    assert element(["a"]) == "a"
    assert element([]) == []
    own = element([PER_TOKEN, OTHER])
    assert torch.equal(own, OTHER)
    assert own.data_ptr() != OTHER.data_ptr()


@pytest.mark.parametrize("value", ["text", 7, 1.5, True, None, (1, 2), b"x"])
def test_anything_else_is_passed_as_it_is(value: Any) -> None:
    assert element(value) is value


def test_without_a_count_no_tensor_is_cut() -> None:
    assert to_payload_element(PER_TOKEN, 1, 2, 5).shape == (5, 2)


# Model policy


def test_a_model_that_needs_no_full_hidden_states_writes_and_merges_outputs_alone() -> None:
    cache = new_cache(policy=ModelPolicy(requires_full_prefix_cached_hidden_states=False))
    cache.update_omni_tensor_prefix_cache(None, k_rows("A", 0, 4), 4, SLOTS_OF_A)
    cache.add_prefix_cached_new_req_id("B")
    outputs = k_rows("B", 4, 6)
    cache.update_omni_tensor_prefix_cache(None, outputs, 2, torch.tensor([12, 13]))
    merged = cache.get_merged_multimodal_states([0], batch([B]), outputs, scheduled([B]))
    assert names(merged["K"]["B"], "K") == "A.0..3 B.4..5"
    assert not cache.hidden_states_cache.any()


def test_a_dotted_name_is_a_key_like_any_other_and_may_be_deferred() -> None:
    policy = ModelPolicy(deferred_mm_cache_keys=frozenset({"codes.audio"}))
    player, deliveries = play(
        "new A c=0 n=4 [1] \n fin A; new B c=4 n=2 [1,3]",
        keys=("codes.audio",),
        policy=policy,
        deferred=policy.deferred_mm_cache_keys,
    )
    assert deliveries[-1].of("B", "codes.audio") == "A.0..3 B.4..5"
    assert player.cache.mm_cache_keys == {"codes.audio"}


KINDS: Sequence[tuple[KeyKind, Any, Mapping[str, Any]]] = [
    (KeyKind.ROW, torch.arange(5), {"A": [0, 1], "B": [2, 3, 4]}),
    (KeyKind.REQUEST, torch.arange(2), {"A": [0], "B": [1]}),
    (KeyKind.REQUEST, torch.arange(5), {"A": [0], "B": [1]}),
    (KeyKind.SHARED, torch.arange(5), {"A": [0, 1, 2, 3, 4], "B": [0, 1, 2, 3, 4]}),
    (KeyKind.LIST, ["a", "b"], {"A": "a", "B": "b"}),
    (KeyKind.LIST_OF_ONE, ["a"], {"A": "a", "B": "a"}),
    (KeyKind.OPAQUE, "text", {"A": "text", "B": "text"}),
]


@pytest.mark.parametrize(("kind", "value", "want"), KINDS)
def test_each_declared_kind_goes_to_whom_it_belongs(kind: KeyKind, value: Any, want: Mapping[str, Any]) -> None:
    _, (delivery,) = play(
        "new A c=0 n=2 [1]; new B c=0 n=3 [2]",
        keys=(),
        extra=lambda line: {"v": value},
        policy=ModelPolicy(kinds={"v": kind}),
    )
    got = {who: part.tolist() if isinstance(part, Tensor) else part for who, part in delivery.mm["v"].items()}
    assert got == want


# Order of calls in a runner


def test_a_runner_s_step_commits_resets_discards_marks_updates_stages_and_merges() -> None:
    story = """
        new A c=0 n=6 [1,2]
        run A c=6 n=2 [1,2]; new C c=4 n=1 [1,3]
        fin A; run C c=5 n=1 [1,3]; new B c=8 n=1 [1,2,4]
        fin C; fin B; new D c=4 n=3 [1,5]
    """
    player, deliveries = play(story, keys=("K", "L"), deferred={"K"})
    for key in (HIDDEN, "K", "L"):
        assert deliveries[1].of("A", key) == "A.6..7"
        assert deliveries[1].of("C", key) == "A.0..3 C.4"
        assert deliveries[2].of("B", key) == "A.0..7 B.8"
        assert deliveries[3].of("D", key) == "A.0..3 D.4..6"
    assert not player.inputs_changed
    assert not any(delivery.changed_since for delivery in deliveries)
    assert player.cache.deferred_req_ids == {"D"}


# Beyond the contract: limits, counters, errors


def test_bytes_of_storage_are_counted_and_bounded() -> None:
    cache = after_a()
    per_key = NUM_BLOCKS * BLOCK_SIZE * WIDTH * 4
    assert cache.nbytes == 2 * per_key
    with pytest.raises(CacheMemoryExceeded):
        new_cache(max_nbytes=per_key - 1)
    after_a(max_nbytes=2 * per_key)
    with pytest.raises(CacheMemoryExceeded, match=r"^key 'K': expected at most 383 bytes of storage, found 384 with"):
        after_a(max_nbytes=2 * per_key - 1)


def test_hits_rows_and_bytes_are_counted() -> None:
    cache = after_a()
    hit(cache)
    row_nbytes = WIDTH * 4
    assert cache.counters.hits == 1
    assert cache.counters.rows_written == {HIDDEN: 6, "K": 6}
    assert cache.counters.rows_served == {HIDDEN: 4, "K": 4}
    assert cache.counters.bytes_copied == (6 + 6 + 4 + 4) * row_nbytes


def test_a_refusal_carries_what_it_says() -> None:
    cache = after_a()
    with pytest.raises(PrefixCacheError) as caught:
        cache.update_omni_tensor_prefix_cache(None, {"K": torch.zeros(4, 3)}, 4, SLOTS_OF_A)
    error = caught.value
    assert isinstance(error, RowFormChanged)
    assert isinstance(error, RuntimeError)
    assert (error.key, error.request, error.step) == ("K", None, -1)
    assert (error.expected, error.found) == (
        "rows of shape [2] torch.float32, as the key was opened with",
        "[3] torch.float32",
    )


def test_steps_are_counted_from_0_by_the_reset_of_marks() -> None:
    cache = after_a()
    for step in range(3):
        cache.reset_prefix_cached_new_req_ids()
        with pytest.raises(RowFormChanged, match=f"^key 'K', step {step}: "):
            cache.update_omni_tensor_prefix_cache(None, {"K": torch.zeros(4, 3)}, 4, SLOTS_OF_A)
