"""Outcome and truth in, agreement or divergence out: every check has an id, and looks at what was handed out alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnisim.checks import gravest
from omnisim.compare import Finding, compare_rows, form_faults, has_plain_storage, same_rows
from omnisim.handed import Handed, HandedOut
from omnisim.replay import Outcome
from omnisim.rows.emit import NOTHING
from omnisim.rows.source import RowSource
from omnisim.subjects import LATER
from omnisim.truth import Due, Prefix, Truth

__all__ = ["Divergence", "Judge", "KeyTally", "Tally"]

_FORM = ("keys", "dtype", "device", "contiguous", "detached", "aliasing")
_OF_ROWS = (*_FORM, "absent-rows", "never-written", "padding", "row-count", "rows", "once-in-order")
_OF_VALUES = (*_FORM, "pass-through")


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """Something that is wrong, at its most telling row; ``failed`` are all checks that it fails, ``check`` the gravest.

    ``req_id`` and ``key`` are None where it is not about an output of one; ``position`` and ``slot`` where no single
    row is at fault. ``found`` is the name that the row carries that came in its place. ``num_cached`` positions of the
    request were to come from the cache, out of ``slots``.
    """

    check: str
    failed: frozenset[str]
    step: int
    req_id: str | None
    key: str | None
    due: str
    came: str
    position: int | None = None
    slot: int | None = None
    found: int | None = None
    num_cached: int = 0
    slots: frozenset[int] = frozenset()


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


class Judge:
    """Judges the outcomes of one replay, in order."""

    def __init__(self, rows: RowSource, truth: Truth) -> None:
        self.tally = Tally()
        self._rows = rows
        self._truth = truth
        self._handed_out = HandedOut()
        self._kept: dict[int, _Owed] = {}
        self._owed: _Owed

    def judge(self, outcome: Outcome) -> list[Divergence]:
        """What is wrong in this step, and outputs of earlier ones that have changed since."""
        due = outcome.due
        if outcome.is_late:
            self._owed = self._kept.pop(due.step.index)
            return self._judge_merged(due, outcome.merged)
        divergences = self._look_again(self._handed_out.next_step(due.step.index))
        divergences += self._judge_inputs(due, outcome.changed)
        self._owed = _Owed(self._rows, self._truth, due)
        if outcome.merged is LATER:
            self._kept[due.step.index] = self._owed.kept()
        else:
            divergences += self._judge_merged(due, outcome.merged)
        if outcome.holding is not None:
            divergences += self._judge_holding(due, outcome.holding)
        return divergences

    def _judge_merged(self, due: Due, merged: Any) -> list[Divergence]:
        divergences: list[Divergence] = []
        for key, values in self._surplus(due, merged):
            divergences += self._judge_surplus(key, due, values)
        for key in due.emitted:
            judge_key = self._judge_rows if key in self._rows.row_keys else self._judge_values
            divergences += judge_key(key, due, _by_request(merged, key))
        return divergences

    def end(self) -> list[Divergence]:
        """Outputs that are no longer what they were when the run ends."""
        return self._look_again(self._handed_out.end())

    def _look_again(self, changed: Iterator[tuple[Handed, int, Tensor]]) -> list[Divergence]:
        came = "an output that changed after it was handed out"
        return [
            self._fail(handed.key, handed.due, row, Finding(frozenset({"aliasing"}), 0, None, came))
            for handed, row, _ in changed
        ]

    # Keys with a row a token

    def _judge_rows(self, key: str, due: Due, values: Mapping[str, Any]) -> list[Divergence]:
        names, counts = self._due_names(key, due)
        expected = self._rows.due_rows(key, names)
        got: list[Any] = [values.get(req_id) for req_id in due.step.req_ids]
        self.tally.count(key, len(got), len(names), _OF_ROWS)
        if self._truth.grade == "content":
            self.tally.checked["isolation"] += len(got)
        if _well_formed(got, counts, expected):
            together = torch.cat(got)
            if same_rows(together, expected, self._rows.tolerance(key)):
                self._handed_out.add(Handed(due, key, range(len(got)), got, together))
                return []
        parts = torch.split(expected, counts)
        outputs = [self._judge_output(key, due, row, value, parts[row]) for row, value in enumerate(got)]
        return [divergence for divergence in outputs if divergence is not None]

    def _due_names(self, key: str, due: Due) -> tuple[NDArray[np.uint64], list[int]]:
        """Names due for ``key`` in batch order, and how many of them are each request's."""
        counts = list(due.step.num_scheduled_tokens)
        names_T = self._rows.named(key, due.names_T, due.lasts_T)
        if not due.prefixes:
            return names_T, counts
        parts, stop = [], 0
        for row, prefix in due.prefixes.items():
            start = due.step.query_start_loc[row]
            cached = self._rows.named(key, prefix.names, prefix.lasts)[self._exists(key, prefix)]
            parts += [names_T[stop:start], cached]
            counts[row] += len(cached)
            stop = start
        return np.concatenate([*parts, names_T[stop:]]), counts

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
        start = _left_out(value, positions, due.had.get(row, 0))
        finding = compare_rows(
            value,
            expected[start:],
            self._rows.tolerance(key),
            lambda found: self._rows.classify(key, found),
            self._owed.own_names(row),
            num_absent,
        )
        if finding is not None:
            return self._fail(key, due, row, finding, positions[start:])
        self._handed_out.add(Handed(due, key, [row], [value], value.detach().clone()))
        return None

    # Keys that are not cached

    def _judge_values(self, key: str, due: Due, values: Mapping[str, Any]) -> list[Divergence]:
        self.tally.count(key, len(due.step.req_ids), 0, _OF_VALUES)
        divergences = []
        for row, req_id in enumerate(due.step.req_ids):
            wanted, got = self._owed.value(key, row), values.get(req_id, NOTHING)
            if failed := _value_faults(wanted, got):
                finding = Finding(frozenset(failed), 0, None, _words(got) + self._whose_value(key, due, got))
                divergences.append(self._fail(key, due, row, finding, due_words=_words(wanted)))
            else:
                for part in _flat_tensors(got):
                    self._handed_out.add(Handed(due, key, [row], [part], part.clone()))
        return divergences

    def _whose_value(self, key: str, due: Due, got: Any) -> str:
        """The request of this batch that the value is due to, in words."""
        for row, req_id in enumerate(due.step.req_ids):
            wanted = self._owed.value(key, row)
            if wanted is not NOTHING and not _value_faults(wanted, got):
                return f", the value of {req_id}"
        return ""

    # What nobody is due

    def _surplus(self, due: Due, merged: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Values of keys that the step did not emit, and of requests that are not in its batch."""
        for key in merged if isinstance(merged, Mapping) else ():
            values = _by_request(merged, key)
            surplus = set(values) - set(due.step.req_ids) if key in due.emitted else set(values)
            if surplus:
                yield key, {req_id: values[req_id] for req_id in sorted(surplus, key=str)}

    def _judge_surplus(self, key: str, due: Due, values: Mapping[str, Any]) -> list[Divergence]:
        self.tally.count(key, len(values), 0, ("keys",))
        what = "no value" if key in due.emitted else "no value: the step did not emit this key"
        self.tally.keys[key].outputs_wrong += len(values)
        self.tally.failed["keys"] += len(values)
        return [
            Divergence("keys", frozenset({"keys"}), due.step.index, str(req_id), key, what, _words(value))
            for req_id, value in values.items()
        ]

    # What the subject must leave alone, and must not keep

    def _judge_inputs(self, due: Due, changed: Sequence[str]) -> list[Divergence]:
        self.tally.checked["inputs-unchanged"] += 1
        wanted, came = "an input left as it was", "another than was given"
        return [self._fail_step("inputs-unchanged", due, name, wanted, came) for name in changed]

    def _judge_holding(self, due: Due, holding: Collection[str]) -> list[Divergence]:
        self.tally.checked["deferred-bound"] += 1
        left = sorted(set(holding) - self._truth.alive)
        if not left:
            return []
        came = f"deferred rows of {len(left)} that are over, {left[0]!r} among them"
        return [self._fail_step("deferred-bound", due, None, "deferred rows of requests that are alive", came)]

    def _fail_step(self, check: str, due: Due, key: str | None, wanted: str, came: str) -> Divergence:
        """A fault of the step, and of none of its outputs."""
        self.tally.failed[check] += 1
        return Divergence(check, frozenset({check}), due.step.index, None, key, wanted, came)

    def _fail(
        self,
        key: str,
        due: Due,
        row: int,
        finding: Finding,
        positions: NDArray[np.int64] | None = None,
        due_words: str = "",
    ) -> Divergence:
        """Enter an output that is wrong."""
        tally = self.tally.keys[key]
        tally.outputs_wrong += 1
        tally.rows_wrong += finding.num_wrong
        self.tally.failed.update(finding.failed)
        req_id, prefix = due.step.req_ids[row], due.prefixes.get(row)
        position = int(positions[finding.at]) if positions is not None and finding.at is not None else None
        due_row = f"the row of position {position} of {req_id}" if position is not None else "what was emitted"
        return Divergence(
            check=gravest(finding.failed),
            failed=finding.failed,
            step=due.step.index,
            req_id=req_id,
            key=key,
            due=due_words or due_row,
            came=finding.came,
            position=position,
            slot=None if position is None else _slot(due, row, position),
            found=finding.found,
            num_cached=0 if prefix is None else len(prefix.names),
            slots=frozenset() if prefix is None else frozenset(prefix.slots.tolist()),
        )


class _Owed:
    """What is due of one step beside its cached rows, asked while the step is the last one emitted."""

    def __init__(self, rows: RowSource, truth: Truth, due: Due) -> None:
        self._rows, self._truth, self._due = rows, truth, due

    def value(self, key: str, row: int) -> Any:
        """What request ``row`` of the batch is due of a key that is not cached."""
        return self._rows.value_for(key, self._due.step, row)

    def own_names(self, row: int) -> Collection[int] | None:
        """Names of a request's own positions, None where the truth does not know another content from its own."""
        if self._truth.grade == "provenance":
            return None
        return set(self._truth.names_of(self._due.step.req_ids[row]).tolist())

    def kept(self) -> _Owed:
        """The same, for a step that is judged after others have been emitted."""
        return _Kept(self._rows, self._truth, self._due)


class _Kept(_Owed):
    def __init__(self, rows: RowSource, truth: Truth, due: Due) -> None:
        super().__init__(rows, truth, due)
        indexes = range(len(due.step.req_ids))
        keys = [key for key in due.emitted if key not in rows.row_keys]
        self._values = {(key, row): _Owed.value(self, key, row) for key in keys for row in indexes}
        self._names = {row: _Owed.own_names(self, row) for row in indexes}

    def value(self, key: str, row: int) -> Any:
        return self._values[key, row]

    def own_names(self, row: int) -> Collection[int] | None:
        return self._names[row]


def _by_request(merged: Any, key: str) -> Mapping[str, Any]:
    """What was handed out for ``key``, by request; nothing where a subject hands out something else altogether."""
    values = merged.get(key) if isinstance(merged, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def _well_formed(got: Sequence[Any], counts: Sequence[int], expected: Tensor) -> bool:
    shape, dtype = tuple(expected.shape[1:]), expected.dtype
    return all(
        type(value) is Tensor
        and value.dtype is dtype
        and value.layout is torch.strided
        and not value.is_nested
        and value.shape == (count, *shape)
        and value.is_cpu
        and value.is_contiguous()
        and not value.requires_grad
        for value, count in zip(got, counts, strict=True)
    )


def _left_out(value: Any, positions: NDArray[np.int64], had: int) -> int:
    """Rows that a resumed request need not get again: those of positions it ``had``, if it got exactly the rest."""
    if not had or not isinstance(value, Tensor) or not has_plain_storage(value) or value.ndim == 0:
        return 0
    left_out = len(positions) - len(value)
    return left_out if 0 < left_out <= int((positions < had).sum()) else 0


def _slot(due: Due, row: int, position: int) -> int:
    num_computed = due.step.num_computed_tokens[row]
    if position < num_computed:
        return int(due.prefixes[row].slots[position])
    return int(due.step.slot_mapping[due.step.query_start_loc[row] + position - num_computed])


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
        return form_faults(got, wanted) | (set() if _holds(got, wanted) else {"pass-through"})
    is_same = type(wanted) is type(got) and (wanted == got or (wanted != wanted and got != got))  # NaN is itself
    return set() if is_same else {"pass-through"}


def _holds(got: Tensor, wanted: Tensor) -> bool:
    if not has_plain_storage(got) or wanted.shape != got.shape:
        return got.is_meta
    return torch.equal(wanted, got.detach().cpu().to(wanted.dtype))


def _flat_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value that was right, each as one dimension."""
    if isinstance(value, Tensor):
        yield value.detach().reshape(-1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat_tensors(item)


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        if not has_plain_storage(value):
            return f"{value.dtype}, sparse, nested or without storage"
        flat = value.detach().cpu().flatten()
        shown = ", ".join(f"{item:g}" for item in flat[:4].tolist())
        return f"{value.dtype} {list(value.shape)} [{shown}{', ...' if flat.numel() > 4 else ''}]"
    if isinstance(value, list):
        return f"a list [{', '.join(map(_words, value[:4]))}{', ...' if len(value) > 4 else ''}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_words(item)}" for name, item in value.items()) + "}"
    return "nothing" if value is NOTHING else repr(value)
