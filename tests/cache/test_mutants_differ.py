"""Each planted mutant is told from the cache by what it does in its situation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from omnisim.cache import KeyKind, ModelPolicy, OmniTensorPrefixCache, PrefixCacheError

from .batches import HIDDEN, NUM_BLOCKS, Delivery, Line, Player, names, read_story
from .mutants import MUTANTS, Mutant

CHECKS = {
    "rows",
    "row-count",
    "keys",
    "pass-through",
    "dtype",
    "device",
    "contiguous",
    "once-in-order",
    "aliasing",
    "isolation",
    "padding",
    "never-written",
    "absent-rows",
    "inputs-unchanged",
    "deferred-bound",
}

HIT = "new A c=0 n=8 [1,2] \n fin A; new B c=8 n=1 [1,2,3]"
TWO_HITS = "new A c=0 n=4 [1] \n new B c=4 n=1 [1,3] \n fin A; fin B; new C c=4 n=1 [1,3]"
PAIR = "new A c=0 n=2 [1]; new B c=0 n=3 [2]"
DEFERRED = {"deferred": frozenset({"K"})}


def emitting(value: Any, kind: KeyKind | None = None) -> dict[str, Any]:
    """Options of a player that hands out ``value`` under the name V."""
    policy = ModelPolicy(kinds={} if kind is None else {"V": kind})
    return {"extra": lambda line: {"V": value.clone() if isinstance(value, Tensor) else value}, "policy": policy}


SITUATIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "prefix-missing": (HIT, {}),
    "prefix-twice": (HIT, {}),
    "prefix-after-new-rows": (HIT, {}),
    "marks-not-reset": (f"{HIT} \n run B c=9 n=1 [1,2,3]", {}),
    "computed-taken-for-hit": ("new A c=0 n=4 [1] \n run A c=4 n=1 [1,2]", {}),
    "partial-tail-dropped": ("new A c=0 n=8 [1,2] \n fin A; new B c=6 n=1 [1,2]", {}),
    "next-block": (HIT, {}),
    "blocks-reversed": (HIT, {}),
    "last-row-lost": (HIT, {}),
    "neighbours-rows": ("new A c=0 n=2 [1]; new B c=0 n=2 [2]", {}),
    "second-group": (
        "new Z c=0 n=4 [3] \n new A c=0 n=4 [1] \n fin A; new B c=4 n=1 [1,4]",
        {"other_groups": [[3, 3]]},
    ),
    "former-tenants-rows": (
        "new Z c=0 n=4 [1] \n fin Z; new A c=0 n=4 [1]; no K \n fin A; new B c=4 n=2 [1,3]",
        {},
    ),
    "absent-rows-as-zeros": ("new A c=0 n=4 [1]; no K \n fin A; new B c=4 n=2 [1,3]", {}),
    "write-lands-late": ("new A c=0 n=4 [1]; new B c=4 n=1 [1,3]", {}),
    "pad-slot-is-last-slot": (
        f"new Z c=0 n=4 [{NUM_BLOCKS - 1}] \n new A c=0 n=2 [1]; slots 4,-1 \n "
        f"fin Z; new B c=4 n=1 [{NUM_BLOCKS - 1},3]",
        {},
    ),
    "deferred-chunks-are-views": ("new A c=0 n=4 [1] \n fin A; new B c=4 n=1 [1,3]", DEFERRED),
    "deferred-rows-land-early": (
        "new A c=0 n=4 [1] \n fin A; new B c=4 n=3 [1,3] \n fin B; new C c=4 n=1 [1,5]",
        DEFERRED,
    ),
    "deferred-never-committed": ("new A c=0 n=4 [1] \n fin A; new B c=4 n=1 [1,3]", DEFERRED),
    "deferred-of-running-ignored": ("new A c=0 n=4 [1] \n run A c=4 n=1 [1,2]; new B c=4 n=2 [1,3]", DEFERRED),
    "late-commit-overwrites": (
        "new A c=0 n=4 [1] \n new C c=0 n=4 [1] \n fin A; run C c=4 n=1 [1,2]; new B c=4 n=1 [1,3]",
        DEFERRED,
    ),
    "deferred-kept-for-ever": ("new A c=0 n=4 [1] \n fin A; new B c=0 n=1 [2]", DEFERRED),
    "misses-are-views": ("new A c=0 n=4 [1]", {}),
    "misses-are-views-of-storage": ("new A c=0 n=4 [1] \n fin A; new B c=0 n=4 [1]", {}),
    "hits-share-scratch": (TWO_HITS, {}),
    "padding-delivered": ("new A c=0 n=3 [1]; pad 8", {}),
    "hits-are-upcast": (HIT, {}),
    "hits-are-elsewhere": (HIT, {}),
    "hits-are-strided": (HIT, {}),
    "input-overwritten": ("new A c=0 n=4 [1]", {}),
    "key-dropped-once-absent": (
        "new A c=0 n=4 [1] \n run A c=4 n=1 [1,2]; no K \n run A c=5 n=1 [1,2]",
        {},
    ),
    "keys-omitted-on-hits": (HIT, {}),
    "value-cloned-to-all": (PAIR, emitting(torch.arange(5))),
    "list-shifted": (PAIR, emitting(["a", "b"])),
    "decode-row-to-all": (
        "new A c=0 n=2 [1] \n run A c=2 n=1 [1]; new B c=0 n=3 [2]",
        {"num_prompt_tokens": {"A": 2, "B": 3}} | emitting(torch.ones(1, 2), KeyKind.DECODE_ROW),
    ),
    "request-value-by-token": (PAIR, emitting(torch.arange(2), KeyKind.REQUEST)),
    "values-are-views": (PAIR, {"overwrites_values": True} | emitting(torch.arange(5))),
}


class Recorder(Player):
    """A player that notes what is seen of a cache from outside."""

    def transcript(self, story: str, overwrites_values: bool) -> Iterator[Any]:
        """What each step hands out, then what changed afterwards and what is still held."""
        emitted: list[Mapping[str, Any]] = []
        extra = self.extra

        def note(line: Line) -> Mapping[str, Any]:
            emitted.append(extra(line))
            return emitted[-1]

        self.extra = note
        deliveries = []
        for line in read_story(story):
            try:
                deliveries.append(self.step(line))
            except PrefixCacheError as refusal:
                yield type(refusal)
                return
            yield seen(deliveries[-1])
            if overwrites_values:
                for value in emitted[-1].values():
                    value.zero_()
        yield [delivery.changed_since for delivery in deliveries if _is_readable(delivery)]
        yield self.inputs_changed, self.cache.deferred_req_ids


def seen(delivery: Delivery) -> dict[tuple[str, str], Any]:
    per_key = {HIDDEN: delivery.hidden, **delivery.mm}
    return {(key, who): form(value, key) for key, per in per_key.items() for who, value in per.items()}


def form(value: Any, key: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    rows = value.tolist() if key == "V" else names(value, key) if value.device.type == "cpu" else "out of reach"
    return rows, value.dtype, value.device.type, value.is_contiguous()


def _is_readable(delivery: Delivery) -> bool:
    return all(value.device.type == "cpu" for value in delivery.tensors())


def transcript(cache_class: type[OmniTensorPrefixCache], name: str) -> list[Any]:
    story, options = SITUATIONS[name]
    options = {"deferred": frozenset(), **options}
    overwrites_values = options.pop("overwrites_values", False)
    policy = options.pop("policy", ModelPolicy())
    cache = cache_class(NUM_BLOCKS, 4, 2, torch.float32, policy=policy)
    player = Recorder(cache, **options)
    return list(player.transcript(story, overwrites_values))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_told_from_the_cache_in_its_situation(mutant: Mutant) -> None:
    right, slip = transcript(OmniTensorPrefixCache, mutant.name), transcript(mutant.cache_class, mutant.name)
    assert slip != right
    assert right[-1][0] is False
    assert not any(right[-2])
    assert not any(isinstance(step, type) for step in slip), "a mutant that refuses shows no judge anything"


def test_every_mutant_has_its_own_name_a_sentence_a_check_and_a_situation() -> None:
    assert [mutant.name for mutant in MUTANTS] == list(SITUATIONS)
    assert len(MUTANTS) >= 18
    for mutant in MUTANTS:
        assert (mutant.cache_class.__doc__ or "").count(".") == 1, mutant.name
        assert mutant.check in CHECKS
        assert mutant.situation


def test_the_mutants_fail_every_check_that_a_class_of_this_kind_can_fail() -> None:
    assert {mutant.check for mutant in MUTANTS} >= CHECKS - {"never-written"}
