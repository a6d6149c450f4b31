"""One request's received rows against its due rows, row by row: what is wrong, and of which sort."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omnisim.checks import gravest
from omnisim.rows.encode import RowKind

__all__ = ["Finding", "Tolerance", "compare_rows", "form_faults", "has_plain_storage", "same_bytes", "same_rows"]

Tolerance = tuple[float, float] | None
"""``(rtol, atol)``, or None where rows must be equal."""
Classify = Callable[[Tensor], tuple[RowKind, int | None]]

_MOST_ROWS_LOOKED_AT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """What is wrong with an output.

    ``failed`` are check ids. ``num_wrong`` due rows did not come at their place; ``at`` is the one that shows the
    gravest of it (an index into the due rows, None where it is not one row's fault), ``came`` says what came there and
    ``found`` is the name that this row carries.
    """

    failed: frozenset[str]
    num_wrong: int = 0
    at: int | None = None
    came: str = "nothing"
    found: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Sort:
    """What sort of wrong row one is: the check that it fails, what to call it, and the name that it carries."""

    check: str
    words: str
    name: int | None = None


def has_plain_storage(value: Tensor) -> bool:
    """Whether the elements can be looked at: neither sparse nor nested nor without storage."""
    return value.layout is torch.strided and not value.is_nested and not value.is_meta


def form_faults(value: Tensor, due: Tensor) -> set[str]:
    """Checks that the mere form of a received tensor fails."""
    faults = {
        "dtype": value.dtype != due.dtype,
        "device": value.device.type != "cpu",
        "contiguous": value.layout is not torch.strided or value.is_nested or not value.is_contiguous(),
        "detached": value.requires_grad,
    }
    return {check for check, is_failed in faults.items() if is_failed}


def same_rows(received: Tensor, due: Tensor, tolerance: Tolerance) -> bool:
    """Whether all rows are the ones due."""
    if tolerance is None:
        return torch.equal(received, due)
    return received.shape == due.shape and torch.allclose(received, due, rtol=tolerance[0], atol=tolerance[1])


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same, with NaN equal to itself."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def compare_rows(
    value: Any,
    due: Tensor,
    tolerance: Tolerance,
    classify: Classify,
    own_names: Collection[int] | None,
    num_absent: int,
) -> Finding | None:
    """What is wrong with ``value`` where ``due`` rows should be, or None.

    ``own_names`` are the names of the request's own content (None where the truth does not know them). ``num_absent``
    is how many of its cached positions have no row of this key.
    """
    if value is None:
        return Finding(frozenset({"keys"}), len(due), 0 if len(due) else None)
    if not isinstance(value, Tensor):
        return Finding(frozenset({"rows"}), len(due), None, f"a {type(value).__name__}")
    faults = form_faults(value, due)
    if not has_plain_storage(value):
        return Finding(frozenset(faults | {"rows"}), len(due), None, "a tensor that cannot be looked into")
    if value.ndim == 0 or value.shape[1:] != due.shape[1:]:
        return Finding(frozenset(faults | {"rows"}), len(due), None, f"a tensor of shape {list(value.shape)}")
    received = value.detach().cpu().to(due.dtype).contiguous()
    comparison = _Comparison(received, due, tolerance, classify, own_names)
    finding = comparison.row_by_row() if len(received) == len(due) else comparison.in_order(num_absent)
    if finding is not None and "dtype" not in faults:
        return Finding(finding.failed | faults, finding.num_wrong, finding.at, finding.came, finding.found)
    if finding is not None:
        faults |= finding.failed
    came = f"{value.dtype} on {value.device.type}, {'contiguous' if value.is_contiguous() else 'strided'}" + (
        ", with an autograd graph" if value.requires_grad else ""
    )
    num_wrong = len(due) if "dtype" in faults else 0
    return Finding(frozenset(faults), num_wrong, None, came) if faults else None


class _Comparison:
    """Received and due rows of the same form."""

    def __init__(
        self,
        received: Tensor,
        due: Tensor,
        tolerance: Tolerance,
        classify: Classify,
        own_names: Collection[int] | None,
    ) -> None:
        self._received, self._due, self._tolerance = received, due, tolerance
        self._classify, self._own_names = classify, own_names

    def row_by_row(self) -> Finding | None:
        """As many came as are due: each has its place."""
        if same_rows(self._received, self._due, self._tolerance):
            return None
        wrong = torch.nonzero(~self._agree(self._received, self._due)).flatten().tolist()
        sorts = {at: self._sort(at) for at in wrong[:_MOST_ROWS_LOOKED_AT]}
        failed = {sort.check for sort in sorts.values()}
        if any(sort.check == "rows" and sort.name is not None for sort in sorts.values()):
            failed.add("once-in-order")
        at = next(at for at, sort in sorts.items() if sort.check == gravest(failed))
        return Finding(frozenset(failed), len(wrong), at, sorts[at].words, sorts[at].name)

    def in_order(self, num_absent: int) -> Finding:
        """More or fewer came than are due: those that are due are looked for, one after another."""
        missing, surplus = self._matched()
        sorts = [self._sort(at) for at in surplus[:_MOST_ROWS_LOOKED_AT]]
        if num_absent and not missing and len(surplus) == num_absent:
            failed = {"absent-rows"} | {sort.check for sort in sorts if sort.check == "isolation"}
        else:
            own = {sort for sort in sorts if sort.check == "rows" and sort.name is not None}
            failed = {"row-count", "once-in-order"} | {sort.check for sort in sorts if sort not in own}
        shown = next((sort for sort in sorts if sort.check == gravest(failed)), sorts[0] if sorts else None)
        came = "nothing" if shown is None else shown.words
        counts = f"{len(self._received)} rows where {len(self._due)} are due"
        return Finding(
            frozenset(failed),
            len(missing),
            missing[0] if missing else None,
            f"{came} ({counts})",
            None if shown is None else shown.name,
        )

    def _agree(self, received: Tensor, due: Tensor) -> Tensor:
        """Which rows are equal, or close enough: bool ``[rows]``."""
        if self._tolerance is None:
            same = received == due
        else:
            same = torch.isclose(received, due, rtol=self._tolerance[0], atol=self._tolerance[1])
        return same.reshape(len(same), -1).all(dim=1)

    def _matched(self) -> tuple[list[int], list[int]]:
        """Match both in order, greedily: due rows that did not come, and rows that came and are not due."""
        missing: list[int] = []
        came: set[int] = set()
        after = 0
        for at, places in enumerate(self._places()):
            first = bisect_left(places, after)
            if first == len(places):
                missing.append(at)
            else:
                came.add(places[first])
                after = places[first] + 1
        return missing, [at for at in range(len(self._received)) if at not in came]

    def _places(self) -> Iterator[list[int]]:
        """For each due row, where it came, in order."""
        if self._tolerance is not None:
            for row in self._due:
                yield torch.nonzero(self._agree(self._received, row.expand_as(self._received))).flatten().tolist()
            return
        places: dict[bytes, list[int]] = defaultdict(list)
        for at, content in enumerate(_contents(self._received)):
            places[content].append(at)
        for content in _contents(self._due):
            yield places.get(content, [])

    def _sort(self, at: int) -> _Sort:
        row = self._received[at]
        kind, name = self._classify(row)
        if kind == "row":
            foreign = self._own_names is not None and name is not None and name not in self._own_names
            return _Sort("isolation" if foreign else "rows", "another row", name)
        if kind == "other":
            return _Sort("rows", f"a row that the model never emitted: {_shown(row)}")
        return _Sort(kind, "a row that was never written" if kind == "never-written" else "a padding row")


def _contents(rows: Tensor) -> list[bytes]:
    if not len(rows):
        return []
    return [row.tobytes() for row in rows.contiguous().view(len(rows), -1).view(torch.uint8).numpy()]


def _shown(row: Tensor) -> str:
    values = row.flatten()[:4].tolist()
    return f"[{', '.join(f'{value:g}' for value in values)}{', ...' if row.numel() > 4 else ''}]"
