"""Outcome and truth in, agreement or divergence out: every check has an id, and looks at what was handed out alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnisim.compare import Finding, compare_rows, form_faults
from omnisim.replay import Outcome
from omnisim.rows.emit import NOTHING
from omnisim.rows.source import RowSource
from omnisim.truth import Due, Prefix, Truth

__all__ = ["CHECKS", "Divergence", "Judge", "KeyTally", "Tally"]

CHECKS = {
    "absent-rows": "a hit gets no rows for positions at which the key was not emitted",
    "isolation": "no row of another content reaches a request",
    "never-written": "no row reaches a request that nobody wrote",
    "padding": "no padding row reaches a request",
    "row-count": "a request gets as many rows as it is due",
    "rows": "each row is the one that is due",
    "once-in-order": "over its life a request gets every position once and in order",
    "keys": "every request gets every key that the step emitted, and no other",
    "dtype": "what comes has the dtype of what the model emitted",
    "device": "what comes is on the CPU",
    "contiguous": "what comes is contiguous",
    "pass-through": "values that are not cached reach the request that they are for",
    "aliasing": "nothing that was handed out changes afterwards",
    "inputs-unchanged": "the subject changes none of its inputs",
    "deferred-bound": "no deferred rows are kept for requests that are over",
}
"""Check ids, the more telling first: an output that fails several is reported under the first of them."""

_FORM = ("keys", "dtype", "device", "contiguous", "aliasing")
_OF_ROWS = (*_FORM, "absent-rows", "never-written", "padding", "row-count", "rows", "once-in-order")
_OF_VALUES = (*_FORM, "pass-through")
_RANK = {check: rank for rank, check in enumerate(CHECKS)}


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """One output that is wrong, at its first wrong row; ``failed`` are all checks that it fails, ``check`` the first.

    ``position`` and ``slot`` are None where no single row is at fault. ``found`` is the name that the row carries that
    came in its place. ``num_cached`` positions of the request were to come from the cache.
    """

    check: str
    failed: frozenset[str]
    step: int
    req_id: str
    key: str
    position: int | None
    slot: int | None
    due: str
    came: str
    found: int | None = None
    num_cached: int = 0


@dataclass(slots=True)
class KeyTally:
    """Counts of one key. An output is what one request gets for the key in one step."""

    outputs_checked: int = 0
    outputs_wrong: int = 0
    rows_checked: int = 0
    rows_wrong: int = 0


@dataclass(slots=True)
class Tally:
    """Counts of a replay, by key and by check."""

    keys: dict[str, KeyTally] = field(default_factory=lambda: defaultdict(KeyTally))
    checked: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def count(self, key: str, outputs: int, rows: int, checks: Sequence[str]) -> None:
        """Enter outputs that are about to be checked."""
        tally = self.keys[key]
        tally.outputs_checked += outputs
        tally.rows_checked += rows
        for check in checks:
            self.checked[check] += outputs


@dataclass(frozen=True, slots=True, eq=False)
class _Handed:
    """Outputs of one key that were right when they were handed out, and a copy, to look at them again."""

    due: Due
    key: str
    req_ids: Sequence[str]
    values: Sequence[Tensor]
    copy: Tensor


class Judge:
    """Judges the outcomes of one replay, in order."""

    def __init__(self, rows: RowSource, truth: Truth) -> None:
        self.tally = Tally()
        self._rows = rows
        self._truth = truth
        self._handed: list[_Handed] = []

    def judge(self, outcome: Outcome, holding: Collection[str] | None = None) -> list[Divergence]:
        """The wrong outputs of this step, and those of the step before that have changed since.

        ``holding`` are the requests for which the subject keeps deferred rows, None if it does not tell.
        """
        due, merged = outcome.due, outcome.merged
        assert merged is not None, "nothing was handed out, so there is nothing to judge"
        divergences = [*self.look_again(), *self._judge_inputs(outcome), *self._judge_surplus_keys(due, merged)]
        for key in due.emitted:
            judge_key = self._judge_rows if key in self._rows.row_keys else self._judge_values
            divergences += judge_key(key, due, merged.get(key, {}))
        if holding is not None:
            divergences += self._judge_holding(due, holding)
        return divergences

    def look_again(self) -> list[Divergence]:
        """Outputs that are no longer what they were when they were handed out: they alias a buffer or the storage."""
        changed = [
            self._fail(handed.key, handed.due, row, Finding(frozenset({"aliasing"}), len(value), None,
                       "an output that changed after it was handed out"))
            for handed in self._handed
            if not _same_bytes(torch.cat(list(handed.values)), handed.copy)
            for row, value in enumerate(handed.values)
            if not _same_bytes(value, torch.split(handed.copy, [len(v) for v in handed.values])[row])
        ]  # fmt: skip
        self._handed = []
        return changed

    # Keys with a row a token

    def _judge_rows(self, key: str, due: Due, values: dict[str, Any]) -> list[Divergence]:
        req_ids = due.step.req_ids
        names, counts = self._due_names(key, due)
        expected = self._rows.due_rows(key, names)
        got: list[Any] = [values.get(req_id) for req_id in req_ids]
        self.tally.count(key, len(got), len(names), _OF_ROWS)
        if self._truth.grade == "content":
            self.tally.checked["isolation"] += len(got)
        if _well_formed(got, counts, expected):
            together = torch.cat(got)
            if self._equal(key)(together, expected):
                self._handed.append(_Handed(due, key, req_ids, got, together))
                return []
        parts = torch.split(expected, counts)
        outputs = [self._judge_output(key, due, row, value, parts[row]) for row, value in enumerate(got)]
        return [divergence for divergence in outputs if divergence is not None]

    def _due_names(self, key: str, due: Due) -> tuple[NDArray[np.uint64], list[int]]:
        """Names due for ``key`` in batch order, and how many of them are each request's."""
        counts = list(due.step.num_scheduled_tokens)
        if not due.prefixes:
            return due.names_T, counts
        parts, stop = [], 0
        for row, prefix in due.prefixes.items():
            start = due.step.query_start_loc[row]
            cached = prefix.names[self._exists(key, prefix)]
            parts += [due.names_T[stop:start], cached]
            counts[row] += len(cached)
            stop = start
        return np.concatenate([*parts, due.names_T[stop:]]), counts

    def _exists(self, key: str, prefix: Prefix) -> NDArray[np.bool_]:
        """Positions of a prefix that have a row of ``key``; one that nobody computed here is due all the same."""
        emitted: NDArray[np.bool_] = (prefix.keys & self._truth.bit(key)) != 0
        return emitted | ~prefix.known

    def _judge_output(self, key: str, due: Due, row: int, value: Any, expected: Tensor) -> Divergence | None:
        num_computed, num_scheduled = due.step.num_computed_tokens[row], due.step.num_scheduled_tokens[row]
        positions = np.arange(num_computed, num_computed + num_scheduled)
        num_absent, prefix = 0, due.prefixes.get(row)
        if prefix is not None:
            exists = self._exists(key, prefix)
            num_absent = len(exists) - int(exists.sum())
            positions = np.concatenate([np.flatnonzero(exists), positions])
            start = _where_it_may_start(value, positions, prefix)
            positions, expected = positions[start:], expected[start:]
        finding = compare_rows(
            value, expected, self._equal(key), lambda found: self._rows.classify(key, found),
            self._own_names(due.step.req_ids[row]), num_absent,
        )  # fmt: skip
        return None if finding is None else self._fail(key, due, row, finding, positions)

    def _own_names(self, req_id: str) -> Collection[int] | None:
        return set(self._truth.names_of(req_id).tolist()) if self._truth.grade == "content" else None

    def _equal(self, key: str) -> Any:
        tolerance = self._rows.tolerance(key)
        if tolerance is None:
            return torch.equal
        rtol, atol = tolerance
        return lambda got, due: torch.allclose(got, due, rtol=rtol, atol=atol)

    # Keys that are not cached

    def _judge_values(self, key: str, due: Due, values: dict[str, Any]) -> list[Divergence]:
        self.tally.count(key, len(due.step.req_ids), 0, _OF_VALUES)
        divergences = []
        for row, req_id in enumerate(due.step.req_ids):
            wanted, got = self._rows.value_for(key, due.step, row), values.get(req_id, NOTHING)
            failed = _value_faults(wanted, got)
            if failed:
                finding = Finding(frozenset(failed), 0, None, _words(got))
                divergences.append(self._fail(key, due, row, finding, due_words=_words(wanted)))
            elif isinstance(got, Tensor):
                self._handed.append(_Handed(due, key, [req_id], [got.reshape(-1)], got.reshape(-1).clone()))
        return divergences

    def _judge_surplus_keys(self, due: Due, merged: dict[str, dict[str, Any]]) -> list[Divergence]:
        return [
            self._fail(key, due, 0, Finding(frozenset({"keys"}), 0, None, "a key that the step did not emit"))
            for key in merged
            if key not in due.emitted and merged[key]
        ]

    # What the subject must leave alone

    def _judge_inputs(self, outcome: Outcome) -> list[Divergence]:
        due, output = outcome.due, outcome.output
        self.tally.checked["inputs-unchanged"] += 1
        changed = [key for key in due.emitted if key in self._rows.row_keys and not self._is_pristine(key, due, output)]
        if not np.array_equal(due.step.slot_mapping, due.slot_mapping):
            changed.append("slot_mapping")
        came = "an input that the subject changed"
        return [self._fail(key, due, 0, Finding(frozenset({"inputs-unchanged"}), 0, None, came)) for key in changed]

    def _is_pristine(self, key: str, due: Due, output: Any) -> bool:
        live = output.hidden_states if key == "hidden_states" else output.multimodal_outputs[key]
        return torch.equal(live[: due.step.num_tokens].cpu(), self._rows.pristine(key, due.step, due.names_T))

    def _judge_holding(self, due: Due, holding: Collection[str]) -> list[Divergence]:
        self.tally.checked["deferred-bound"] += 1
        left = sorted(set(holding) - self._truth.alive)
        if not left:
            return []
        came = f"deferred rows kept for {len(left)} requests that are over, {left[0]!r} among them"
        return [self._fail("", due, 0, Finding(frozenset({"deferred-bound"}), 0, None, came))]

    def _fail(
        self,
        key: str,
        due: Due,
        row: int,
        finding: Finding,
        positions: NDArray[np.int64] | None = None,
        due_words: str = "",
    ) -> Divergence:
        tally = self.tally.keys[key]
        tally.outputs_wrong += 1
        tally.rows_wrong += finding.num_wrong
        self.tally.failed.update(finding.failed)
        req_id = due.step.req_ids[row]
        position = int(positions[finding.at]) if positions is not None and finding.at is not None else None
        due_row = f"the row of position {position} of {req_id}" if position is not None else "what was emitted"
        return Divergence(
            check=min(finding.failed, key=_RANK.__getitem__),
            failed=finding.failed,
            step=due.step.index,
            req_id=req_id,
            key=key,
            position=position,
            slot=None if position is None else _slot(due, row, position),
            due=due_words or due_row,
            came=finding.came,
            found=finding.found,
            num_cached=len(due.prefixes[row].names) if row in due.prefixes else 0,
        )


def _well_formed(got: Sequence[Any], counts: Sequence[int], expected: Tensor) -> bool:
    shape, dtype = tuple(expected.shape[1:]), expected.dtype
    return all(
        type(value) is Tensor
        and value.dtype is dtype
        and value.shape == (count, *shape)
        and value.is_cpu
        and value.is_contiguous()
        for value, count in zip(got, counts, strict=True)
    )


def _where_it_may_start(value: Any, positions: NDArray[np.int64], prefix: Prefix) -> int:
    """Rows that a resumed request need not get again: those it already had, if it got exactly the rest."""
    if not prefix.may_start or not isinstance(value, Tensor) or value.ndim == 0:
        return 0
    left_out = len(positions) - len(value)
    return left_out if 0 < left_out <= int((positions < prefix.may_start).sum()) else 0


def _slot(due: Due, row: int, position: int) -> int:
    num_computed = due.step.num_computed_tokens[row]
    if position < num_computed:
        return int(due.prefixes[row].slots[position])
    return int(due.step.slot_mapping[due.step.query_start_loc[row] + position - num_computed])


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Equal, with NaN equal to itself."""
    return torch.equal(one, other) or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _value_faults(wanted: Any, got: Any) -> set[str]:
    """Checks that a value which is not cached fails; nothing at all is as good as no rows."""
    if wanted is NOTHING:
        empty = got is NOTHING or got is None or (isinstance(got, Tensor) and got.ndim > 0 and len(got) == 0)
        return set() if empty else {"pass-through"}
    if got is NOTHING:
        return {"keys"}
    if isinstance(wanted, dict) and isinstance(got, dict):
        names = wanted.keys() | got.keys()
        return set().union(*(_value_faults(wanted.get(n, NOTHING), got.get(n, NOTHING)) for n in names))
    if isinstance(wanted, Tensor) and isinstance(got, Tensor):
        if got.is_meta:
            return form_faults(got, wanted)
        same = wanted.shape == got.shape and torch.equal(wanted, got.detach().cpu().to(wanted.dtype))
        return form_faults(got, wanted) | (set() if same else {"pass-through"})
    return set() if type(wanted) is type(got) and wanted == got else {"pass-through"}


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().flatten()
        shown = ", ".join(f"{item:g}" for item in flat[:4].tolist())
        return f"{value.dtype} {list(value.shape)} [{shown}{', ...' if flat.numel() > 4 else ''}]"
    if isinstance(value, list):
        return f"a list [{', '.join(map(_words, value[:4]))}{', ...' if len(value) > 4 else ''}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_words(item)}" for name, item in value.items()) + "}"
    return "nothing" if value is NOTHING else repr(value)
