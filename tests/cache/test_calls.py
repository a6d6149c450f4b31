"""Calls that a runner may make in another way than most, or should not make: the right rows, or a refusal by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omnisim.cache import OmniTensorPrefixCache
from omnisim.cache import errors as refusal
from omnisim.cache.slots import RowStore, Slots

from .batches import BLOCK_SIZE, NUM_BLOCKS, Request, batch, names, rows, scheduled, starts

A, C = Request("A", 0, 4, (1, 2)), Request("C", 0, 4, (5, 6))
PAIR = [A, C]
SLOTS = {"A": torch.tensor([4, 5, 6, 7]), "C": torch.tensor([20, 21, 22, 23])}


def new_cache(width: int = 2, cache_class: Any = OmniTensorPrefixCache) -> Any:
    """A cache in its first step."""
    cache = cache_class(NUM_BLOCKS, BLOCK_SIZE, width, torch.float32)
    cache.reset_prefix_cached_new_req_ids()
    return cache


def emitted(*owners: str, keys: str = "K") -> dict[str, Tensor]:
    """Rows 0 to 4 of each owner, by key."""
    return {key: torch.cat([rows(owner, 0, 4, key="K") for owner in owners]) for key in keys}


def update(cache: Any, owner: str, keys: str = "K", *, skip: str = "", hidden: bool = True) -> None:
    """Rows 0 to 4 of one request at its slots."""
    live = rows(owner, 0, 4) if hidden else None
    cache.update_omni_tensor_prefix_cache(
        live, emitted(owner, keys=keys), 4, SLOTS[owner], skip_mm_cache_keys=set(skip)
    )


def stage(cache: Any, *requests: Request, keys: str = "K") -> None:
    """Rows 0 to 4 of these requests, with counts that include them."""
    outputs = emitted(*(request.id for request in requests), keys=keys)
    counted = batch(requests, np.array([4 for _ in requests]))
    cache.stage_deferred_mm_outputs(starts(requests), counted, outputs, scheduled(requests), list(keys))


def hit(cache: Any, block: int = 1, key: str = "K", num_new: int = 2) -> str:
    """What B gets of a key, which hits one block, in a step of its own."""
    cache.reset_prefix_cached_new_req_ids()
    cache.add_prefix_cached_new_req_id("B")
    b = Request("B", 4, num_new, (block, 3))
    outputs = {key: rows("B", 4, 4 + num_new, key="K")}
    return names(cache.get_merged_multimodal_states([0], batch([b]), outputs, scheduled([b]))[key]["B"], "K")


def hit_hidden(cache: Any, block: int = 1) -> str:
    """The same of hidden states, in the step that is on."""
    cache.add_prefix_cached_new_req_id("B")
    b = Request("B", 4, 2, (block, 3))
    return names(cache.get_merged_hidden_states([0], batch([b]), rows("B", 4, 6), scheduled([b]))["B"])


# Rows in the strides of the buffer that they were cut from

LONE_ROWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "columns of a wider buffer": lambda dtype: torch.arange(36).to(dtype).view(4, 9)[:1, :8],
    "columns of a wider buffer, at an odd offset": lambda dtype: torch.arange(36).to(dtype).view(4, 9)[1:2, :8],
    "one column": lambda dtype: torch.arange(1, 37).to(dtype).view(4, 9)[:1, :1],
    "one row of a transposed buffer": lambda dtype: torch.arange(1, 37).to(dtype).view(9, 4)[:1].t()[:1],
    "a column as rows": lambda dtype: torch.arange(1, 37).to(dtype).view(9, 4)[:1].t(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("what", LONE_ROWS)
@pytest.mark.parametrize("given", ["live", "staged", "key"])
def test_rows_that_are_contiguous_in_foreign_strides_are_written(what: str, dtype: torch.dtype, given: str) -> None:
    value = LONE_ROWS[what](dtype)
    assert value.is_contiguous()
    num_rows = len(value)
    cache = OmniTensorPrefixCache(NUM_BLOCKS, BLOCK_SIZE, value.shape[1], dtype)
    hidden = torch.zeros_like(value) if given == "staged" else value
    staged = value if given == "staged" else None
    outputs = {"K": value} if given == "key" else None
    cache.update_omni_tensor_prefix_cache(
        None if given == "key" else hidden, outputs, num_rows, SLOTS["A"][:num_rows], hidden_states_cpu=staged
    )
    storage = cache.mm_outputs_cache["K"] if given == "key" else cache.hidden_states_cache
    assert torch.equal(storage[1, :num_rows], value)


def test_an_update_that_fails_leaves_every_row_of_its_slots_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    update(cache, "A")
    cache.reset_prefix_cached_new_req_ids()

    def fails(tensor: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "cpu", fails)
        with pytest.raises(RuntimeError):
            update(cache, "A")
    for broken in (torch.zeros(4, 3), torch.tensor(1.0), torch.zeros(3, 2)):
        for skip in (set(), {"K"}):
            with pytest.raises(refusal.PrefixCacheError):
                cache.update_omni_tensor_prefix_cache(rows("Z", 0, 4), {"K": broken}, 4, SLOTS["A"], None, skip)
    assert hit(cache) == "A.0..3 B.4..5"
    assert hit_hidden(cache) == "A.0..3 B.4..5"


# Several calls in one step


@pytest.mark.parametrize("stages", ["whole", "halves"])
def test_a_batch_that_was_updated_in_halves_is_staged_where_it_belongs(stages: str) -> None:
    cache = new_cache()
    for request in PAIR:
        update(cache, request.id, skip="K")
        if stages == "halves":
            stage(cache, request)
    if stages == "whole":
        stage(cache, *PAIR)
    cache.commit_deferred_mm_outputs(["A", "C"], batch([]))
    assert [hit(cache, 1), hit(cache, 5)] == ["A.0..3 B.4..5", "C.0..3 B.4..5"]
    assert [hit_hidden(cache, 1), hit_hidden(cache, 5)] == ["A.0..3 B.4..5", "C.0..3 B.4..5"]


def test_staging_other_tokens_than_the_updates_of_the_step_told_is_refused() -> None:
    cache = new_cache()
    for request in PAIR:
        update(cache, request.id, skip="K")
    with pytest.raises(refusal.BadCounts) as caught:
        stage(cache, A)
    want = "key 'K', step 0: expected to stage the 8 tokens whose slots this step's updates told, found 4 tokens"
    assert str(caught.value) == want


@pytest.mark.parametrize("has_update", [False, True])
def test_keys_that_are_staged_together_without_being_named_share_the_turn_of_the_step(has_update: bool) -> None:
    cache = new_cache()
    if has_update:
        update(cache, "A", keys="L")
    stage(cache, A, keys="JK")
    cache.commit_deferred_mm_outputs(["A"], batch([]))
    assert [hit(cache, key=key) for key in "JK"] == ["A.0..3 B.4..5"] * 2
    if has_update:
        assert hit(cache, key="L") == hit_hidden(cache) == "A.0..3 B.4..5"


@pytest.mark.parametrize("skip", ["K", ""])
def test_rows_that_are_staged_before_the_update_are_there(skip: str) -> None:
    cache = new_cache()
    stage(cache, A)
    update(cache, "A", keys="K" if skip else "L", skip=skip)
    cache.commit_deferred_mm_outputs(["A"], batch([]))
    assert hit(cache) == hit_hidden(cache) == "A.0..3 B.4..5"


def test_hidden_rows_that_are_told_twice_in_a_step_keep_the_keys_of_the_first_time() -> None:
    cache = new_cache()
    update(cache, "A")
    update(cache, "A", keys="")
    assert hit(cache) == hit_hidden(cache) == "A.0..3 B.4..5"


def test_a_caller_that_never_tells_steps_apart_is_never_served_a_former_tenant() -> None:
    cache = OmniTensorPrefixCache(NUM_BLOCKS, BLOCK_SIZE, 2, torch.float32)
    update(cache, "A", keys="KL")
    stage(cache, A, keys="J")
    cache.update_omni_tensor_prefix_cache(rows("C", 0, 4), {"L": rows("C", 0, 4, key="K")}, 4, SLOTS["A"])
    cache.commit_deferred_mm_outputs(["A"], batch([]))
    assert [hit(cache, key=key) for key in "JKL"] == ["B.4..5", "B.4..5", "C.0..3 B.4..5"]


# Rows that were put off


def test_a_skipped_key_that_is_never_staged_is_refused_at_a_hit_and_others_are_served() -> None:
    cache = new_cache()
    update(cache, "A", keys="KL", skip="K")
    with pytest.raises(refusal.RowsDiscarded) as caught:
        hit(cache)
    assert str(caught.value) == (
        "key 'K', request 'B', step 1: expected a row of position 0 in slot 4, "
        "found none: it was deferred and never staged, or discarded before it was committed"
    )
    assert hit(cache, key="L") == hit_hidden(cache) == "A.0..3 B.4..5"
    update(cache, "A", keys="L")
    assert hit(cache) == "B.4..5", "its slots were computed again, without the key"


def test_a_hit_commits_the_requests_that_hold_its_rows_and_no_others() -> None:
    cache = new_cache()
    update(cache, "A", skip="K")
    update(cache, "C", skip="K")
    stage(cache, *PAIR)
    assert hit(cache) == "A.0..3 B.4..5"
    assert cache.deferred_req_ids == {"C"}


class NoSearch(OmniTensorPrefixCache):
    def _commit_owner_of(self, store: RowStore, slot: int, turn: int) -> bool:
        raise AssertionError("nobody put off a row of this hit")


def test_a_hit_on_rows_that_lack_a_key_looks_for_no_holder() -> None:
    cache = new_cache(cache_class=NoSearch)
    update(cache, "A", skip="K")
    stage(cache, A)
    update(cache, "C", keys="")
    assert hit(cache, block=5) == "B.4..5"


@pytest.mark.parametrize("is_packed", [True, False])
def test_what_a_request_holds_deferred_keeps_no_other_s_rows_alive(is_packed: bool) -> None:
    cache = new_cache()
    counted = batch(PAIR, np.array([4, 4]))
    at = [0, 4] if is_packed else [4, 0]
    cache.stage_deferred_mm_outputs(at, counted, emitted("A", "C"), scheduled(PAIR), ["K"])
    for per_key in cache._deferred_mm_outputs.values():
        (chunk,) = per_key["K"]
        assert chunk.rows.untyped_storage().nbytes() == chunk.rows.nbytes
        assert chunk.slots.base is None


def test_merged_rows_of_a_hit_take_no_other_s_along_when_they_are_sent() -> None:
    cache = new_cache()
    update(cache, "A")
    cache.reset_prefix_cached_new_req_ids()
    cache.add_prefix_cached_new_req_id("B")
    requests = [Request("B", 4, 2, (1, 3)), C]
    live = torch.cat([rows("B", 4, 6), rows("C", 0, 4)])
    merged = cache.get_merged_hidden_states(starts(requests), batch(requests), live, scheduled(requests))
    assert merged["B"].untyped_storage().nbytes() == merged["B"].nbytes
    assert names(pickle.loads(pickle.dumps(merged["C"].clone()))) == "C.0..3"  # noqa: S301


# Inference mode

MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], AbstractContextManager[Any]]]] = {
    "opened inside, written outside": (torch.inference_mode, nullcontext),
    "opened outside, written inside": (nullcontext, torch.inference_mode),
}


@pytest.mark.parametrize("direction", MODES)
def test_rows_are_written_and_committed_on_either_side_of_inference_mode(direction: str) -> None:
    first, second = MODES[direction]
    with first():
        cache = new_cache()
        update(cache, "A", keys="KL", skip="K")
        stage(cache, A)
    with second():
        update(cache, "C", keys="KL", skip="K")
        stage(cache, C)
        cache.commit_deferred_mm_outputs(["A", "C"], batch([]))
    for block, owner in ((1, "A"), (5, "C")):
        assert [hit(cache, block, key) for key in "KL"] == [f"{owner}.0..3 B.4..5"] * 2
        with torch.inference_mode():
            assert hit_hidden(cache, block) == f"{owner}.0..3 B.4..5"


# A row a token, or a row a request?


def decode(cache: Any, requests: list[Request], merges: bool = True) -> None:
    """A step of these requests that emits as many rows as there are requests, K."""
    cache.reset_prefix_cached_new_req_ids()
    slots = torch.tensor([slot for request in requests for slot in request.slots()])
    outputs = {"K": torch.ones(len(requests), 2)}
    cache.update_omni_tensor_prefix_cache(None, outputs, len(slots), slots)
    if merges:
        cache.get_merged_multimodal_states(starts(requests), batch(requests), outputs, scheduled(requests))


IDLE = Request("D", 4, 0, (7,))
AMBIGUOUS = {
    "as many requests as tokens": [[Request("A", at, 1, (1,))] for at in range(4)],
    "a request without tokens": [[Request("A", at, 2, (1,)), IDLE] for at in (0, 2)],
    "requests that decode beside one without tokens": [
        [Request("A", at, 1, (1,)), Request("C", at, 2, (5, 6)), IDLE] for at in range(4)
    ],
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_a_key_that_may_be_a_row_a_request_is_refused_at_a_hit(what: str) -> None:
    cache = new_cache()
    for requests in AMBIGUOUS[what]:
        decode(cache, requests)
    with pytest.raises(refusal.AmbiguousKey):
        hit(cache, num_new=1)


def test_a_key_that_only_updates_of_a_token_a_block_have_shown_is_refused_at_a_hit() -> None:
    cache = new_cache()
    for at in range(4):
        decode(cache, [Request("A", at, 1, (1,)), Request("C", at, 1, (5,))], merges=False)
    with pytest.raises(refusal.AmbiguousKey):
        hit(cache, num_new=1)


def test_a_key_that_only_an_update_of_a_whole_block_has_shown_is_served() -> None:
    cache = new_cache()
    update(cache, "A")
    assert hit(cache, num_new=1) == "A.0..3 B.4"


def test_a_merge_of_more_tokens_than_requests_settles_what_a_key_is() -> None:
    cache = new_cache()
    decode(cache, [Request("C", 0, 1, (5,))])
    update(cache, "A")
    cache.get_merged_multimodal_states([0], batch([A]), emitted("A"), {"A": 4})
    decode(cache, [Request("C", 1, 1, (5,))])
    assert hit(cache, num_new=1) == "A.0..3 B.4"


# What cannot be right

WRONG_COUNTS = {
    "NaN": (np.array([float("nan")]), "nan"),
    "infinity": (torch.tensor([float("inf")]), "tensor(inf)"),
    "negative": (np.array([-3]), "-3"),
    "a fraction": ([3.99], "3.99"),
}


@pytest.mark.parametrize("what", WRONG_COUNTS)
@pytest.mark.parametrize("called", ["merge", "stage"])
def test_computed_tokens_that_are_no_count_are_refused(what: str, called: str) -> None:
    counts, found = WRONG_COUNTS[what]
    cache, b = new_cache(), Request("B", 4, 1, (1, 3))
    cache.add_prefix_cached_new_req_id("B")
    told, outputs = batch([b], counts), {"K": torch.ones(1, 2)}
    call: dict[str, Callable[[], object]] = {
        "merge": lambda: cache.get_merged_hidden_states([0], told, outputs["K"], {"B": 1}),
        "stage": lambda: cache.stage_deferred_mm_outputs([0], told, outputs, {"B": 1}, ["K"]),
    }
    with pytest.raises(refusal.BadCounts) as caught:
        call[called]()
    want = "request 'B', step 0: expected a number of computed tokens in num_computed_tokens_cpu, found"
    assert str(caught.value) == f"{want} {found}"


WRONG_SPANS: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "a start is missing": ([0], {"A": 4, "C": 4}, "C", "IndexError('list index out of range')"),
    "a count is missing": ([0, 4], {"A": 4}, "C", "KeyError('C')"),
    "a count is a fraction": (
        [0, 4],
        {"A": 4, "C": 3.5},
        "C",
        """TypeError("'float' object cannot be interpreted as an integer")""",
    ),
    "a start is negative": ([-4, 0], {"A": 4, "C": 4}, "A", "4 from -4 on"),
    "a count is negative": ([0, 4], {"A": 4, "C": -4}, "C", "-4 from 4 on"),
    "tokens are of two requests": ([0, 3], {"A": 4, "C": 4}, "C", "4 from 3 on"),
}


@pytest.mark.parametrize("what", WRONG_SPANS)
@pytest.mark.parametrize("called", ["merge", "merge of keys", "stage"])
def test_tokens_that_no_batch_can_have_are_refused_by_request_and_step(what: str, called: str) -> None:
    at, counts, request, found = WRONG_SPANS[what]
    cache, outputs, pair = new_cache(), emitted("A", "C"), batch(PAIR)
    call: dict[str, Callable[[], object]] = {
        "merge": lambda: cache.get_merged_hidden_states(at, pair, outputs["K"], counts),
        "merge of keys": lambda: cache.get_merged_multimodal_states(at, pair, outputs, counts),
        "stage": lambda: cache.stage_deferred_mm_outputs(at, pair, outputs, counts, ["K"]),
    }
    with pytest.raises(refusal.BadCounts) as caught:
        call[called]()
    assert (caught.value.request, caught.value.step, caught.value.found) == (request, 0, found)


@pytest.mark.parametrize("ids", [None, [1.5], ["one"]])
def test_a_hook_that_gives_no_block_ids_is_refused(ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OmniTensorPrefixCache, "_get_cached_block_ids", lambda self, req_idx, input_batch: ids)
    with pytest.raises(refusal.SlotOutOfRange) as caught:
        hit_hidden(new_cache())
    assert str(caught.value) == f"request 'B', step 0: expected block ids that are integers, found {ids}"


WRONG_SLOTS = {
    "two tokens of one slot": (torch.tensor([4, 5, 4, -1]), "a slot of its own for each token", "slot 4 twice"),
    "floats": (torch.tensor([4.0, 5.2, 6.0, 7.0]), "slots that are integers", "float32"),
    "truth values": (torch.tensor([True, False, True, True]), "slots that are integers", "bool"),
}


@pytest.mark.parametrize("what", WRONG_SLOTS)
def test_slots_that_cannot_be_right_are_refused(what: str) -> None:
    slots, expected, found = WRONG_SLOTS[what]
    cache = new_cache()
    with pytest.raises(refusal.SlotOutOfRange) as caught:
        cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), None, 4, slots)
    assert str(caught.value) == f"step 0: expected {expected}, found {found}"
    assert not cache.hidden_states_cache.any()


def test_any_number_of_tokens_may_have_the_pad_slot() -> None:
    cache = new_cache()
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), None, 4, torch.tensor([-1, 4, -1, -1]))
    assert names(cache.hidden_states_cache[1, :2]) == "A.1 zero"
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 2), None, 2, torch.tensor([-1, -1]))


def test_hidden_states_that_are_missing_are_refused_with_a_copy_or_without() -> None:
    cache, copy = new_cache(), rows("A", 0, 4)
    want = r"^key 'hidden_states_cpu', step 0: expected no hidden_states_cpu where hidden_states is None, found one$"
    with pytest.raises(refusal.StagedCopyMismatch, match=want):
        cache.update_omni_tensor_prefix_cache(None, None, 4, SLOTS["A"], hidden_states_cpu=copy)
    with pytest.raises(refusal.StagedCopyMismatch, match=want):
        cache.get_merged_hidden_states([0], batch([A]), None, {"A": 4}, hidden_states_cpu=copy)
    with pytest.raises(refusal.RowsMissing, match=r"^key 'hidden_states', step 0: .* 4 scheduled tokens, found None$"):
        cache.get_merged_hidden_states([0], batch([A]), None, {"A": 4})


# Counters, and moves to the CPU


def test_a_request_that_is_marked_twice_in_a_step_is_one_hit() -> None:
    cache = new_cache()
    for _ in range(2):
        cache.add_prefix_cached_new_req_id("B")
    cache.reset_prefix_cached_new_req_ids()
    cache.add_prefix_cached_new_req_id("B")
    assert cache.counters.hits == 2


def test_rows_are_moved_to_the_cpu_once_a_step_and_again_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    to_cpu = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        moved.append(tensor.data_ptr())
        return to_cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    cache = new_cache()
    buffers = {key: rows("A", 0, 4, key=key).t().contiguous().t() for key in ("hidden_states", "K")}
    hidden, outputs = buffers["hidden_states"], {"K": buffers["K"]}
    for owner in "AZ":
        cache.reset_prefix_cached_new_req_ids()
        moved.clear()
        for key, buffer in buffers.items():
            buffer.copy_(rows(owner, 0, 4, key=key))
        cache.update_omni_tensor_prefix_cache(hidden, outputs, 4, SLOTS["A"])
        merged = cache.get_merged_hidden_states([0], batch([A]), hidden, {"A": 4})
        merged_k = cache.get_merged_multimodal_states([0], batch([A]), outputs, {"A": 4})["K"]
        assert [moved.count(buffer.data_ptr()) for buffer in buffers.values()] == [1, 1]
        assert names(merged["A"]) == names(merged_k["A"], "K") == f"{owner}.0..3"


def test_a_caller_that_never_tells_steps_apart_gets_what_its_buffer_holds_now() -> None:
    cache = OmniTensorPrefixCache(NUM_BLOCKS, BLOCK_SIZE, 2, torch.float32)
    hidden = rows("A", 0, 4).t().contiguous().t()
    cache.update_omni_tensor_prefix_cache(hidden, None, 4, SLOTS["A"])
    hidden.copy_(rows("C", 0, 4))
    assert names(cache.get_merged_hidden_states([0], batch([A]), hidden, {"A": 4})["A"]) == "C.0..3"


def test_a_step_s_slots_are_looked_at_once_and_not_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Slots] = []
    cache = new_cache()
    update(cache, "A", skip="K")
    update(cache, "C", skip="K")
    monkeypatch.setattr(cache._clock, "take", taken.append)
    stage(cache, *PAIR)
    assert [slots.tolist() for slots in taken] == [[4, 5, 6, 7, 20, 21, 22, 23]]
