"""One request's received rows against its due rows, row by row: what is wrong, and of which sort."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omnisim.rows.encode import RowKind

__all__ = ["Finding", "compare_rows", "form_faults"]

Equal = Callable[[Tensor, Tensor], bool]
Classify = Callable[[Tensor], tuple[RowKind, int | None]]

_MOST_ROWS_LOOKED_AT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """What is wrong with an output.

    ``failed`` are check ids. ``num_wrong`` due rows did not come at their place; ``at`` is the first of them (an index
    into the due rows, None where it is not one row's fault), ``came`` says what came there and ``found`` is the name
    that this row carries.
    """

    failed: frozenset[str]
    num_wrong: int
    at: int | None
    came: str
    found: int | None = None


def form_faults(value: Tensor, due: Tensor) -> set[str]:
    """Checks that the mere form of a received tensor fails."""
    faults = {
        "dtype": value.dtype != due.dtype,
        "device": value.device.type != "cpu",
        "contiguous": not value.is_contiguous(),
    }
    return {check for check, is_failed in faults.items() if is_failed}


def compare_rows(
    value: Any, due: Tensor, equal: Equal, classify: Classify, own_names: Collection[int] | None, num_absent: int
) -> Finding | None:
    """What is wrong with ``value`` where ``due`` rows should be, or None.

    ``own_names`` are the names of the request's own content (None where the truth does not know them). ``num_absent``
    is how many of its cached positions have no row of this key.
    """
    if value is None:
        return Finding(frozenset({"keys"}), len(due), 0, "nothing")
    if not isinstance(value, Tensor):
        return Finding(frozenset({"rows"}), len(due), None, f"a {type(value).__name__}")
    faults = form_faults(value, due)
    if value.shape[1:] != due.shape[1:] or value.ndim == 0:
        return Finding(frozenset(faults | {"rows"}), len(due), None, f"a tensor of shape {list(value.shape)}")
    if value.is_meta:
        return Finding(frozenset(faults), len(due), None, "a tensor without storage")
    received = value.detach().cpu().to(due.dtype)
    if len(received) == len(due):
        finding = _same_number(received, due, equal, classify, own_names)
    else:
        finding = _other_number(received, due, equal, classify, own_names, num_absent)
    if finding is None:
        came = f"{value.dtype} on {value.device.type}, {'contiguous' if value.is_contiguous() else 'strided'}"
        return Finding(frozenset(faults), len(due), None, came) if faults else None
    return Finding(finding.failed | faults, finding.num_wrong, finding.at, finding.came, finding.found)


def _same_number(
    received: Tensor, due: Tensor, equal: Equal, classify: Classify, own_names: Collection[int] | None
) -> Finding | None:
    if equal(received, due):
        return None
    differs = (received != due).reshape(len(due), -1).any(dim=1)
    wrong = [at for at in torch.nonzero(differs).flatten().tolist() if not equal(received[at], due[at])]
    sorts = [_sort(received[at], classify, own_names) for at in wrong[:_MOST_ROWS_LOOKED_AT]]
    failed = {check for check, _, _ in sorts}
    if any(check == "rows" and found is not None for check, _, found in sorts):
        failed.add("once-in-order")
    _, came, found = sorts[0]
    return Finding(frozenset(failed), len(wrong), wrong[0], came, found)


def _other_number(
    received: Tensor,
    due: Tensor,
    equal: Equal,
    classify: Classify,
    own_names: Collection[int] | None,
    num_absent: int,
) -> Finding:
    missing, surplus, stand_in = _walk(received, due, equal)
    sorts = {at: _sort(received[at], classify, own_names) for at in surplus[:_MOST_ROWS_LOOKED_AT]}
    failed = {check for check, _, found in sorts.values() if not (check == "rows" and found is not None)}
    if num_absent and not missing and len(surplus) == num_absent:
        failed = (failed - {"never-written", "rows"}) | {"absent-rows"}
    else:
        failed |= {"row-count", "once-in-order"}
    came, found = "nothing", None
    if stand_in is not None:
        _, came, found = sorts.get(stand_in) or _sort(received[stand_in], classify, own_names)
    counts = f"{len(received)} rows where {len(due)} are due"
    return Finding(frozenset(failed), len(missing) or len(surplus), missing[0] if missing else None,
                   f"{came} ({counts})", found)  # fmt: skip


def _walk(received: Tensor, due: Tensor, equal: Equal) -> tuple[list[int], list[int], int | None]:
    """Match both in order: due rows that did not come, rows that came and are not due, and the first out of place."""
    missing, matched, next_received = [], set(), 0
    for at in range(len(due)):
        found = next((i for i in range(next_received, len(received)) if equal(received[i], due[at])), None)
        if found is None:
            missing.append(at)
        else:
            matched.add(found)
            next_received = found + 1
    surplus = [i for i in range(len(received)) if i not in matched]
    return missing, surplus, surplus[0] if surplus else None


def _sort(row: Tensor, classify: Classify, own_names: Collection[int] | None) -> tuple[str, str, int | None]:
    """Check id, words and name of a row that is not the one due."""
    kind, name = classify(row)
    if kind == "row":
        foreign = own_names is not None and name is not None and name not in own_names
        return ("isolation" if foreign else "rows"), "another row", name
    if kind == "other":
        return "rows", f"a row that the model never emitted: {_shown(row)}", None
    return kind, "a row that was never written" if kind == "never-written" else "a padding row", None


def _shown(row: Tensor) -> str:
    values = row.flatten()[:4].tolist()
    return f"[{', '.join(f'{value:g}' for value in values)}{', ...' if row.numel() > 4 else ''}]"
