"""Every defect that was seen in released caches and can be told at the level of the class: ours gives the right rows,
or refuses by a name of its own.

Stories are told in the notation of ``tests.cache.batches``. What only a trace can tell (salts, adapters and images
behind equal token ids) is judged by the replay: the class sees slots, and they are the same. "contract 7" is row 7 of
the contract's list of what goes wrong, "corpus" names a row of the defect corpus. The live buffer (contract 15) is part
of every story: the player overwrites the model's buffers after each step, and ``check`` looks at each delivery again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from omnisim.cache import KeyKind, ModelPolicy, OmniTensorPrefixCache, PrefixCacheError
from omnisim.cache import errors as refusal

from .batches import (
    HIDDEN,
    Delivery,
    Line,
    Player,
    Request,
    batch,
    names,
    play,
    read_story,
    rows,
    scheduled,
    starts,
)


def check(story: str, wants: Mapping[str, str], **options: Any) -> None:
    """In its last step the story hands out ``wants``: ``{"B": hidden rows of B, "B.K": its rows of key K}``."""
    player, deliveries = play(story, **options)
    for who, want in wants.items():
        req_id, _, key = who.partition(".")
        assert deliveries[-1].of(req_id, key or HIDDEN) == want, f"step {len(deliveries) - 1}, {who}"
    assert not [step for step, delivery in enumerate(deliveries) if delivery.changed_since], "changed after delivery"
    assert not player.inputs_changed


def check_refused(
    story: str, error: type[PrefixCacheError], where: str, expected: str, found: str, **options: Any
) -> None:
    """The story ends in ``error``, whose message is ``"{where}: expected {expected}, found {found}"``."""
    with pytest.raises(error) as caught:
        play(story, **options)
    assert type(caught.value) is error
    assert str(caught.value) == f"{where}: expected {expected}, found {found}"


ENTERS = "new A c=0 n=4 [1]"
HIT = "fin A; new B c=4 n=2 [1,3]"
HIT_ROWS = "A.0..3 B.4..5"


def two_steps(second: str = HIT) -> str:
    return f"{ENTERS}\n{second}"


Case = tuple[str, dict[str, str], dict[str, Any]]

RIGHT: dict[str, Case] = {
    # prefix rows
    # contract 2
    "a hit that ends inside a block gets the odd rows": (
        "new A c=0 n=8 [1,2] \n fin A; new B c=6 n=1 [1,2]",
        {"B": "A.0..5 B.6", "B.K": "A.0..5 B.6"},
        {},
    ),
    # in the corpus: partial-block (U/4624)
    "a hit that ends one short of a block gets nine rows": (
        "new A c=0 n=8 [1,2] \n new B c=7 n=2 [1,2,3]",
        {"B": "A.0..6 B.7..8", "B.K": "A.0..6 B.7..8"},
        {},
    ),
    # contract 11; same-step hit (U/7877, V/38715)
    "a hit on a block that is filled in the same step reads it": (
        "new Z c=0 n=4 [1] \n fin Z; new A c=0 n=8 [1,2]; new B c=4 n=3 [1,3]",
        {"A": "A.0..7", "B": "A.0..3 B.4..6", "B.K": "A.0..3 B.4..6"},
        {},
    ),
    # in the corpus: same-step hit (U/7877)
    "a hit stands before the request that fills its block in the same step": (
        "new Z c=0 n=4 [1] \n fin Z; new B c=4 n=3 [1,3]; new A c=0 n=8 [1,2]",
        {"A": "A.0..7", "B": "A.0..3 B.4..6", "B.K": "A.0..3 B.4..6"},
        {},
    ),
    # in the corpus: one step late (U/6323)
    "no write lands a step late": (
        "new A c=0 n=8 [1,2]; new B c=4 n=3 [1,3]",
        {"B": "A.0..3 B.4..6", "B.K": "A.0..3 B.4..6"},
        {},
    ),
    # in the corpus: hit mark leaks
    "a mark does not leak into the next step": (
        two_steps() + "\n run B c=6 n=1 [1,3]",
        {"B": "B.6", "B.K": "B.6"},
        {},
    ),
    # in the corpus: chunked tail (U/2164)
    "the tail of a chunked prefill after a hit is a step like any other": (
        two_steps() + "\n run B c=6 n=2 [1,3]",
        {"B": "B.6..7", "B.K": "B.6..7"},
        {},
    ),
    # in the corpus: full-prompt hit (V/17999)
    "a prompt that is cached whole is computed again from its last block": (
        "new A c=0 n=8 [1,2] \n fin A; new B c=4 n=4 [1,3] \n fin B; new C c=8 n=1 [1,2,4]",
        {"C": "A.0..7 C.8"},
        {},
    ),
    # contract 12; resume (U/7902, U/8034)
    "a resumed request that hits gets every position": (
        "new A c=0 n=8 [1,2] \n new D c=0 n=1 [5] \n resume A c=4 n=5 [1,9,10]",
        {"A": "A.0..8", "A.K": "A.0..8"},
        {},
    ),
    # in the corpus: forced reset (V/28827)
    "a request whose cache was reset starts over in its new blocks": (
        "new A c=0 n=4 [1] \n resume A=N c=0 n=5 [2,3] \n fin A; new B c=4 n=1 [2,4]",
        {"B": "N.0..3 B.4", "B.K": "N.0..3 B.4"},
        {"deferred": "K"},
    ),
    # in the corpus: continuation (U/6039)
    "a continuation under the same id gets what its mark says": (
        f"{ENTERS} \n new A c=4 n=2 [1,3]",
        {"A": "A.4..5", "A.K": "A.4..5"},
        {},
    ),
    # contract 17; optimistic counts (V/32951)
    "rows of rejected drafts are replaced by the next step": (
        "new A c=0 n=8 [1,2] \n run A=R c=8 n=4 [1,2,3] \n run A c=10 n=2 [1,2,3] \n fin A; new B c=12 n=1 [1,2,3,4]",
        {"B": "A.0..7 R.8..9 A.10..11 B.12", "B.K": "A.0..7 R.8..9 A.10..11 B.12"},
        {"deferred": "K"},
    ),
    # contract 13; pad slot (V/43810)
    "a pad slot stores nothing": (
        "new Z c=0 n=4 [11] \n new A c=0 n=4 [1]; slots 4,5,6,-1 \n fin Z; new B c=4 n=1 [11,3]",
        {"B": "Z.0..3 B.4", "B.K": "Z.0..3 B.4"},
        {},
    ),
    # contract 13
    "a pad slot keeps neither the other rows of its step nor deferred ones": (
        "new A c=0 n=4 [1]; slots 4,5,6,-1 \n fin A; new B c=3 n=1 [1]",
        {"B": "A.0..2 B.3", "B.K": "A.0..2 B.3"},
        {"deferred": "K"},
    ),
    # contract 16; groups (U/2164)
    "only the first of two KV-cache groups is read": (
        "new Z c=0 n=4 [3] \n new A c=0 n=4 [1] \n fin A; new B c=4 n=1 [1,4]",
        {"B": "A.0..3 B.4", "B.K": "A.0..3 B.4"},
        {"other_groups": [[3, 3]]},
    ),
    # contract 10
    "a block that was freed and taken over has the rows of its new tenant": (
        "new Z c=0 n=4 [1] \n fin Z; new A c=0 n=4 [1] \n fin A; new B c=4 n=2 [1,3]",
        {"B": HIT_ROWS, "B.K": HIT_ROWS},
        {},
    ),
    # multimodal keys
    # contract 1; rank 3
    "a key of two trailing dimensions goes the round trip": (two_steps(), {"B.K": HIT_ROWS}, {"shape": (3, 2)}),
    "a key of three trailing dimensions goes the round trip": (two_steps(), {"B.K": HIT_ROWS}, {"shape": (2, 1, 3)}),
    # contract 3; late key (U/4169)
    "a key that was absent when a block was filled has no rows there": (
        "new A c=0 n=4 [1]; no K \n fin A; new B c=4 n=2 [1,3]",
        {"B": HIT_ROWS, "B.K": "B.4..5"},
        {},
    ),
    "a key that came in one chunk of two has the rows of that one": (
        "new A c=0 n=4 [1]; no K \n run A c=4 n=4 [1,2] \n fin A; new B c=8 n=1 [1,2,3]",
        {"B": "A.0..7 B.8", "B.K": "A.4..7 B.8"},
        {},
    ),
    # in the corpus: recycled block
    "a recycled block never gives its former tenant's rows": (
        "new Z c=0 n=4 [1] \n fin Z; new A c=0 n=4 [1]; no K \n fin A; new B c=4 n=2 [1,3]",
        {"B": HIT_ROWS, "B.K": "B.4..5"},
        {},
    ),
    "a recycled block never gives its former tenant's deferred rows": (
        "new Z c=0 n=4 [1] \n new A c=0 n=4 [1]; no K \n fin Z; new B c=4 n=2 [1,3]",
        {"B": HIT_ROWS, "B.K": "B.4..5"},
        {"deferred": "K"},
    ),
    # in the corpus: deferred, shifted; live buffer (U/6039)
    "deferred rows land where they belong": (
        f"{ENTERS} \n fin A; new B c=4 n=3 [1,3] \n fin B; new C c=4 n=1 [1,5]",
        {"C": "A.0..3 C.4", "C.K": "A.0..3 C.4"},
        {"deferred": "K"},
    ),
    # contract 9
    "deferred rows land where they belong though staging gets the counts of before the step": (
        f"{ENTERS} \n fin A; new B c=4 n=3 [1,3] \n fin B; new C c=4 n=1 [1,5]",
        {"C": "A.0..3 C.4", "C.K": "A.0..3 C.4"},
        {"deferred": "K", "stages_with_counts_before": True},
    ),
    # contract 8; deferred, still running
    "deferred rows of a running request can be hit": (
        f"{ENTERS} \n run A c=4 n=1 [1,2]; new B c=4 n=2 [1,3]",
        {"A.K": "A.4", "B": HIT_ROWS, "B.K": HIT_ROWS},
        {"deferred": "K"},
    ),
    "deferred rows of the same step can be hit": (
        f"{ENTERS}; new B c=4 n=2 [1,3]",
        {"B": HIT_ROWS, "B.K": HIT_ROWS},
        {"deferred": "K"},
    ),
    # in the corpus: deferred, abort (U/6039)
    "deferred rows of a request that is not scheduled are committed when it finishes": (
        f"{ENTERS} \n new D c=0 n=1 [7] \n fin A; run D c=1 n=1 [7] \n new B c=4 n=2 [1,3]",
        {"B": HIT_ROWS, "B.K": HIT_ROWS},
        {"deferred": "K"},
    ),
    "deferred rows survive the reuse of the request's id": (
        f"{ENTERS} \n fin A; new A=G c=0 n=4 [2] \n fin A; new B c=4 n=2 [1,3]",
        {"B.K": HIT_ROWS},
        {"deferred": "K"},
    ),
    # contract 13
    "padding is neither cached nor delivered": (
        "new A c=0 n=5 [1,2]; pad 8 \n fin A; new B c=4 n=2 [1,3]; pad 4",
        {"B": HIT_ROWS, "B.K": HIT_ROWS},
        {},
    ),
    # in the corpus: key unpadded
    "a key that arrives unpadded in a padded step is cached": (
        "new A c=0 n=5 [1,2]; pad 8 \n fin A; new B c=4 n=2 [1,3]",
        {"B": HIT_ROWS, "B.K": HIT_ROWS},
        {"pads_keys": False},
    ),
    # identity, as far as slots tell it
    # contract 18; replacement (U/8068, V/49449)
    "a replaced prompt in new blocks gives its own rows": (
        "new A c=0 n=8 [1,2] \n new A=N c=0 n=8 [3,4] \n fin A; new B c=8 n=1 [3,4,5]",
        {"B": "N.0..7 B.8", "B.K": "N.0..7 B.8"},
        {"deferred": "K"},
    ),
    "a replaced prompt in the same blocks gives its own rows": (
        "new A c=0 n=4 [1] \n new A=N c=0 n=4 [1] \n fin A; new B c=4 n=2 [1,3]",
        {"B": "N.0..3 B.4..5", "B.K": "N.0..3 B.4..5"},
        {"deferred": "K"},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    story, wants, options = RIGHT[name]
    check(story, wants, **options)


Refusal = tuple[str, type[PrefixCacheError], str, str, str, dict[str, Any]]

REFUSED: dict[str, Refusal] = {
    # in the corpus: external KV (U/6654)
    "a block that was filled elsewhere (external KV)": (
        "new B c=4 n=1 [5,3]",
        refusal.NeverWritten,
        "key 'hidden_states', request 'B', step 0",
        "a row of position 0 in slot 20",
        "none: nobody wrote it through this cache",
        {},
    ),
    # in the corpus: null block (V/14097)
    "the null block of a sliding window": (
        "new A c=0 n=8 [2,3] \n fin A; new B c=12 n=1 [2,0,3,4]",
        refusal.NeverWritten,
        "key 'hidden_states', request 'B', step 1",
        "a row of position 4 in slot 0",
        "none: nobody wrote it through this cache (block 0 is vLLM's null block)",
        {},
    ),
    # contract 13; pad slot
    "the pad slot of a token that a hit covers": (
        "new A c=0 n=4 [1]; slots 4,5,6,-1 \n fin A; new B c=4 n=1 [1,3]",
        refusal.NeverWritten,
        "key 'hidden_states', request 'B', step 1",
        "a row of position 3 in slot 7",
        "none: nobody wrote it through this cache",
        {},
    ),
    # in the corpus: stale slots (U/3726)
    "a slot mapping that lags the block table": (
        "new A c=0 n=4 [1]; slots 0,1,2,3 \n fin A; new B c=4 n=1 [1,3]",
        refusal.NeverWritten,
        "key 'hidden_states', request 'B', step 1",
        "a row of position 0 in slot 4",
        "none: nobody wrote it through this cache",
        {},
    ),
    # contract 13
    "a slot past the cache": (
        "new A c=0 n=4 [1]; slots 4,5,6,48",
        refusal.SlotOutOfRange,
        "step 0",
        "slots in [0, 48), or -1 for none",
        "slot 48",
        {},
    ),
    "a negative slot that is not the pad slot": (
        "new A c=0 n=4 [1]; slots 4,5,-2,7",
        refusal.SlotOutOfRange,
        "step 0",
        "slots in [0, 48), or -1 for none",
        "slot -2",
        {},
    ),
    "fewer slots than tokens": (
        "new A c=0 n=4 [1]; slots 4,5,6",
        refusal.SlotOutOfRange,
        "step 0",
        "4 slots",
        "3",
        {},
    ),
    "a block past the cache": (
        "new B c=4 n=1 [12,3]",
        refusal.SlotOutOfRange,
        "request 'B', step 0",
        "block ids in [0, 12)",
        "[12]",
        {},
    ),
    # contract 14
    "computed tokens past the blocks of the request": (
        "new A c=0 n=8 [1,2] \n fin A; new B c=8 n=1 [1]; slots 12",
        refusal.BlockTableTooShort,
        "request 'B', step 1",
        "blocks for 8 computed tokens",
        "1 blocks of 4",
        {},
    ),
    # contract 7
    "deferred rows of an aborted request": (
        f"{ENTERS} \n new D c=0 n=1 [7] \n abort A; run D c=1 n=1 [7] \n new B c=4 n=2 [1,3]",
        refusal.RowsDiscarded,
        "key 'K', request 'B', step 3",
        "a row of position 0 in slot 4",
        "none: it was deferred and never staged, or discarded before it was committed",
        {"deferred": "K"},
    ),
    # contract 5; coincidence (U/4355)
    "a key that was taken for tokens and may have been requests": (
        "new A c=0 n=1 [1] \n run A c=1 n=1 [1]; new C c=0 n=1 [2] \n new B c=1 n=1 [1]",
        refusal.AmbiguousKey,
        "key 'K', request 'B', step 2",
        "a key known to have a row a token (declare its kind in ModelPolicy.kinds)",
        "one that every step so far may have had as many rows of as of requests",
        {},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    story, error, where, expected, found, options = REFUSED[name]
    check_refused(story, error, where, expected, found, **options)


# What a story cannot tell: values beside the rows


def deliver(story: str, extra: Mapping[str, Any], policy: ModelPolicy | None = None) -> Delivery:
    """The last delivery of a story whose every step emits ``extra`` in place of K."""
    return play(story, keys=(), extra=lambda line: extra, policy=policy)[1][-1]


PAIR = "new A c=0 n=2 [1]; new B c=0 n=3 [2]"


# in the corpus: 1-D metadata (U/3665), and padded
@pytest.mark.parametrize("padding", [0, 3])
def test_metadata_a_token_are_cut_to_the_request_and_never_cached(padding: int) -> None:
    value = torch.tensor([7, 7, 9, 9, 9] + [0] * padding)
    player, (delivery,) = play(f"{PAIR}; pad 8", keys=(), extra=lambda line: {"ref_code_len": value})
    assert {who: part.tolist() for who, part in delivery.mm["ref_code_len"].items()} == {"A": [7, 7], "B": [9, 9, 9]}
    assert not player.cache.mm_cache_keys


# contract 4; 0-dim value
def test_a_value_of_no_dimension_passes_through() -> None:
    delivery = deliver(PAIR, {"sr": torch.tensor(24000)})
    assert {who: part.item() for who, part in delivery.mm["sr"].items()} == {"A": 24000, "B": 24000}


DECODE_PAIR = "new A c=0 n=1 [1]; new B c=0 n=1 [2]"


# contract 5; coincidence (U/4355)
def test_a_declared_value_a_request_is_never_cached_where_requests_are_as_many_as_tokens() -> None:
    policy = ModelPolicy(kinds={"spk": KeyKind.REQUEST})
    spk = torch.arange(6.0).view(2, 3)
    player, deliveries = play(
        f"{DECODE_PAIR} \n run A c=1 n=1 [1]; run B c=1 n=2 [2]",
        keys=(),
        extra=lambda line: {"spk": spk},
        policy=policy,
    )
    for delivery in deliveries:
        assert {who: part.tolist() for who, part in delivery.mm["spk"].items()} == {"A": [[0, 1, 2]], "B": [[3, 4, 5]]}
    assert not player.cache.mm_cache_keys


def test_an_undeclared_value_a_request_is_refused_once_it_cannot_be_a_row_a_token() -> None:
    spk = {"spk": torch.zeros(2, 3)}
    check_refused(
        f"{DECODE_PAIR} \n run A c=1 n=1 [1]; run B c=1 n=2 [2]",
        refusal.RowsMissing,
        "key 'spk', step 1",
        "a row for each of 3 scheduled tokens (or a declared kind in ModelPolicy.kinds)",
        "2 rows",
        keys=(),
        extra=lambda line: spk,
    )


# in the corpus: decode rows (U/4355)
def test_rows_of_decoding_requests_go_to_those_that_decode() -> None:
    policy = ModelPolicy(kinds={"codes": KeyKind.DECODE_ROW})
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32, policy=policy)
    requests = [Request("A", 4, 1, (1, 3)), Request("B", 0, 3, (2,))]
    input_batch = batch(requests)
    input_batch.num_prompt_tokens = np.array([4, 3])
    outputs = {"codes": torch.tensor([[5, 6]])}
    cache.update_omni_tensor_prefix_cache(None, outputs, 4, torch.tensor([12, 8, 9, 10]))
    merged = cache.get_merged_multimodal_states(starts(requests), input_batch, outputs, scheduled(requests))
    assert merged["codes"]["A"].tolist() == [[5, 6]]
    assert merged["codes"]["B"].shape == (0, 2)
    assert not cache.mm_cache_keys


# in the corpus: list of one (U/4370)
def test_a_list_of_one_is_for_all_only_where_it_is_declared() -> None:
    value = {"codes.ref": [torch.tensor([1, 2])]}
    whole = deliver(PAIR, value).mm["codes.ref"].values()
    assert [len(part) for part in whole] == [1, 1], "undeclared, it is handed on whole and the consumer indexes it"
    of_one = ModelPolicy(kinds={"codes.ref": KeyKind.LIST_OF_ONE})
    assert [part.tolist() for part in deliver(PAIR, value, of_one).mm["codes.ref"].values()] == [[1, 2], [1, 2]]
    with pytest.raises(refusal.RowsMissing) as caught:
        deliver(PAIR, value, ModelPolicy(kinds={"codes.ref": KeyKind.LIST}))
    where = "key 'codes.ref', request 'B', step 0"
    assert str(caught.value) == f"{where}: expected a value of kind 'list' with a part for this request, found 1 in all"


# in the corpus: dict values
@pytest.mark.parametrize(
    ("value", "kind", "want"),
    [(torch.tensor([7, 9]), KeyKind.REQUEST, {"A": [7], "B": [9]}), ([7, 9], KeyKind.LIST, {"A": 7, "B": 9})],
)
def test_a_value_a_request_inside_a_dict_is_never_cut_by_tokens(value: Any, kind: KeyKind, want: Any) -> None:
    parts = deliver(PAIR, {"meta": {"len": value}}, ModelPolicy(kinds={"meta": {"len": kind}})).mm["meta"]
    got = {who: part["len"] for who, part in parts.items()}
    assert {who: v.tolist() if isinstance(v, torch.Tensor) else v for who, v in got.items()} == want


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (KeyKind.REQUEST, [7, 9], "list"),
        (KeyKind.ROW, torch.tensor(7), "a tensor of shape []"),
        (KeyKind.LIST, torch.tensor([7, 9]), "a tensor of shape [2]"),
        ({"len": KeyKind.REQUEST}, 7, "int"),
    ],
)
def test_a_value_of_another_kind_than_declared_is_refused_by_name(kind: Any, value: Any, found: str) -> None:
    with pytest.raises(
        refusal.RowFormChanged, match=r"key 'meta', request 'A', step 0: expected a value of kind"
    ) as caught:
        deliver(PAIR, {"meta": value}, ModelPolicy(kinds={"meta": kind}))
    assert caught.value.found == found


# in the corpus: nested payload (U/3510)
def test_rows_inside_a_dict_are_refused_on_a_hit_and_merge_once_flattened() -> None:
    def nested(line: Line) -> Mapping[str, Any]:
        return {"hidden_states": {"layers": {0: torch.ones(line.num_tokens, 2)}}}

    check_refused(
        two_steps(),
        refusal.NestedRows,
        "key 'hidden_states.layers.0', request 'B', step 1",
        "rows of a hit under a dotted name of their own, where they can be cached",
        "a tensor of 2 rows inside a dict",
        keys=(),
        extra=nested,
    )
    flat = "hidden_states.layers.0"
    _, deliveries = play(two_steps(), keys=(), extra=lambda line: {flat: nested(line)["hidden_states"]["layers"][0]})
    assert deliveries[-1].mm[flat]["B"].shape == deliveries[-1].hidden["B"].shape == (6, 2)


# The form of a key

FORMS = {
    "width": (torch.zeros(4, 3), "[3] torch.float32"),
    "dtype": (torch.zeros(4, 2, dtype=torch.bfloat16), "[2] torch.bfloat16"),
    "rank": (torch.zeros(4, 2, 1), "[2, 1] torch.float32"),
    "rank, down to one value a token": (torch.zeros(4), "[] torch.float32"),
    "rank, down to a number": (torch.tensor(1.0), "[] torch.float32"),
}


# contract 6; width, dtype or rank changes
@pytest.mark.parametrize("what", FORMS)
@pytest.mark.parametrize("called", ["update", "merge", "stage"])
def test_a_key_that_comes_back_in_another_form_is_refused_and_stays_usable(what: str, called: str) -> None:
    value, found = FORMS[what]
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32)
    requests = [Request("A", 0, 4, (1,))]
    slots, counts = torch.tensor([4, 5, 6, 7]), scheduled(requests)
    good = {"K": rows("A", 0, 4, key="K")}
    cache.update_omni_tensor_prefix_cache(None, good, 4, slots)
    call: dict[str, Callable[[], object]] = {
        "update": lambda: cache.update_omni_tensor_prefix_cache(None, {"K": value}, 4, slots),
        "merge": lambda: cache.get_merged_multimodal_states([0], batch(requests), {"K": value}, counts),
        "stage": lambda: cache.stage_deferred_mm_outputs([0], batch(requests, [4]), {"K": value}, counts, {"K"}),
    }
    with pytest.raises(refusal.RowFormChanged) as caught:
        call[called]()
    want = "key 'K', step -1: expected rows of shape [2] torch.float32, as the key was opened with, found"
    assert str(caught.value) == f"{want} {found}"
    merged = cache.get_merged_multimodal_states([0], batch(requests), good, counts)
    assert names(merged["K"]["A"], "K") == "A.0..3"


# contract 6
def test_fewer_rows_than_scheduled_are_refused_by_name() -> None:
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32)
    requests = [Request("A", 0, 4, (1,))]
    slots = torch.tensor([4, 5, 6, 7])
    cache.update_omni_tensor_prefix_cache(None, {"K": torch.zeros(4, 2)}, 4, slots)
    short = {"K": torch.zeros(3, 2)}
    message = r"^key 'K', step -1: expected a row for each of 4 .*, found 3 rows$"
    with pytest.raises(refusal.RowsMissing, match=message):
        cache.update_omni_tensor_prefix_cache(None, short, 4, slots)
    with pytest.raises(refusal.RowsMissing, match=message):
        cache.get_merged_multimodal_states([0], batch(requests), short, scheduled(requests))


def test_a_refused_step_writes_nothing() -> None:
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32)
    slots = torch.tensor([4, 5, 6, 7])
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), {"K": rows("A", 0, 4, key="K")}, 4, slots)
    with pytest.raises(refusal.RowFormChanged):
        cache.update_omni_tensor_prefix_cache(rows("Z", 0, 4), {"K": torch.zeros(4, 3)}, 4, slots)
    cache.add_prefix_cached_new_req_id("B")
    requests = [Request("B", 4, 1, (1, 3))]
    merged = cache.get_merged_hidden_states([0], batch(requests), rows("B", 4, 5), scheduled(requests))
    assert names(merged["B"]) == "A.0..3 B.4"


# in the corpus: wide head (U/5781)
def test_hidden_rows_of_another_width_than_the_model_s_are_refused() -> None:
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32)
    with pytest.raises(
        refusal.RowFormChanged, match=r"key 'hidden_states'.* expected rows of shape \[2\].* found \[5\]"
    ):
        cache.update_omni_tensor_prefix_cache(torch.zeros(4, 5), None, 4, torch.tensor([4, 5, 6, 7]))


# in the corpus: tensor, then list
def test_a_key_that_comes_as_a_list_later_is_that_list() -> None:
    def emits(line: Line) -> Mapping[str, Any]:
        return {"K": torch.ones(4, 2)} if line.requests[0].id == "A" else {"K": ["one", "two"]}

    _, deliveries = play(two_steps(), keys=(), extra=emits)
    assert deliveries[-1].mm == {"K": {"B": ["one", "two"]}}


# in the corpus: last row only
def test_rows_of_which_only_the_last_is_filled_are_served_as_emitted() -> None:
    def last_only(line: Line) -> Mapping[str, Any]:
        value = torch.zeros(line.num_tokens, 2)
        value[-1] = 5
        return {"K": value}

    _, deliveries = play(two_steps(), keys=(), extra=last_only)
    assert deliveries[-1].mm["K"]["B"][:, 0].tolist() == [0, 0, 0, 5, 0, 5]


def test_rows_of_width_0_are_rows() -> None:
    _, deliveries = play(two_steps(), keys=(), extra=lambda line: {"K": torch.zeros(line.num_tokens, 0)})
    assert deliveries[-1].mm["K"]["B"].shape == (6, 0)


# in the corpus: None at prefill (U/4199)
def test_outputs_that_are_none_at_prefill_are_an_empty_result_and_the_key_is_opened_later() -> None:
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32)
    player = Player(cache)
    first, second = read_story(f"{ENTERS} \n run A c=4 n=1 [1,2]")
    requests = first.requests
    cache.update_omni_tensor_prefix_cache(rows("A", 0, 4), None, 4, torch.tensor([4, 5, 6, 7]))
    cache.stage_deferred_mm_outputs([0], batch(requests, [4]), None, scheduled(requests), {"K"})
    assert cache.get_merged_multimodal_states([0], batch(requests), None, scheduled(requests)) == {}
    assert player.step(second).of("A", "K") == "A.4"
    assert cache.mm_cache_keys == {"K"}


# in the corpus: capped memory (U/4317)
def test_a_key_past_the_memory_limit_is_refused_and_never_left_out() -> None:
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32, max_nbytes=12 * 4 * 2 * 4)
    with pytest.raises(refusal.CacheMemoryExceeded) as caught:
        cache.update_omni_tensor_prefix_cache(None, {"K": torch.zeros(4, 1)}, 4, torch.tensor([4, 5, 6, 7]))
    assert str(caught.value) == "key 'K': expected at most 384 bytes of storage, found 576 with this key"


# The layout


# contract 16; kernel block (U/6654)
@pytest.mark.parametrize(
    ("attribute", "value", "found"),
    [
        ("block_size", 8, "blocks of 8, context parallel size 1"),
        ("dcp_world_size", 2, "blocks of 4, context parallel size 2"),
    ],
)
def test_a_layout_with_other_slots_is_refused(attribute: str, value: int, found: str) -> None:
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32)
    cache.reset_prefix_cached_new_req_ids()
    cache.add_prefix_cached_new_req_id("B")
    requests = [Request("B", 4, 1, (1, 3))]
    input_batch = batch(requests)
    setattr(input_batch.block_table[0], attribute, value)
    with pytest.raises(refusal.UnsupportedLayout) as caught:
        cache.get_merged_hidden_states([0], input_batch, rows("B", 4, 5), scheduled(requests))
    want = "step 0: expected a block table in blocks of 4 without decode context parallelism"
    assert str(caught.value) == f"{want}, found {found}"


def test_more_than_one_group_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="omnisim.cache.prefix_cache"):
        play(f"{two_steps()} \n fin B; new C c=4 n=1 [1,5]", other_groups=[[3, 3]])
    assert caplog.messages == ["2 KV-cache groups: rows are cached by the first group's blocks only"]


# contract 9
def test_staging_by_counts_that_cannot_include_the_step_is_refused() -> None:
    cache = OmniTensorPrefixCache(12, 4, 2, torch.float32)
    requests = [Request("A", 0, 4, (1,))]
    outputs = {"K": rows("A", 0, 4, key="K")}
    with pytest.raises(refusal.BadCounts) as caught:
        cache.stage_deferred_mm_outputs([0], batch(requests), outputs, scheduled(requests), {"K"})
    want = "request 'A', step -1: expected num_computed_tokens_cpu to count this step's 4 tokens, found 0"
    assert str(caught.value) == want


# contract 10; delayed read (U/6654)
def test_what_was_delivered_stays_when_its_blocks_are_taken_over_before_it_is_read() -> None:
    _, (_, saved, later) = play(f"{ENTERS} \n {HIT} \n fin B; new C c=0 n=4 [1]")
    assert saved.of("B") == saved.of("B", "K") == HIT_ROWS
    assert later.of("C") == "C.0..3"
