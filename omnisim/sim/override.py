"""Scenarios changed from the command line: ``--set engine.num_blocks=40``, ``--sweep engine.block_size=16,32``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from omnisim.errors import FileError, UsageError
from omnisim.sim.scenario import FORMAT, Scenario
from omnisim.trace.words import close_field, complaint, culprit_of
from omnisim.trace.yamlform import Node, convert_node, parse_value

__all__ = ["Change", "changed", "parse_set", "parse_sweep", "variants"]

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
"""Text that is text in YAML without quotes."""
_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class Change:
    """A field of a scenario, by its dotted path, and the value it gets. Groups of traffic go by number or name."""

    option: str
    path: str
    value: Any

    def __str__(self) -> str:
        """``PATH=VALUE``, as ``parse_set`` reads it."""
        bare = (
            isinstance(self.value, str) and _WORD.fullmatch(self.value) and self.value not in ("true", "false", "null")
        )
        return f"{self.path}={self.value if bare else msgspec.json.encode(self.value).decode()}"


def parse_set(text: str) -> Change:
    """``PATH=VALUE``; UsageError for what is not."""
    path, _, value = text.partition("=")
    if not value or not _PATH.fullmatch(path):
        raise UsageError(f"--set {text!r} is no PATH=VALUE", "for example --set engine.num_blocks=40")
    return Change("--set", path, _value(value, f"--set {text}"))


def parse_sweep(text: str) -> tuple[Change, ...]:
    """``PATH=VALUE,VALUE,...``, a change for each value; UsageError for what is not."""
    path, equals, values = text.partition("=")
    listed = _value(f"[{values}]", f"--sweep {text}") if equals and _PATH.fullmatch(path) else None
    if not listed:
        raise UsageError(f"--sweep {text!r} is no PATH=VALUE,VALUE", "for example --sweep engine.block_size=16,32")
    return tuple(Change("--sweep", path, value) for value in listed)


def _value(text: str, place: str) -> Any:
    try:
        return parse_value(text, place)
    except FileError as error:
        raise UsageError(error.what.replace(f"{place}:1: ", f"{place}: "), error.remedy) from None


def variants(sweeps: Sequence[tuple[Change, ...]]) -> Iterator[tuple[Change, ...]]:
    """Each combination of the values swept over."""
    return product(*sweeps)


def changed(node: Node, place: str, changes: Sequence[Change]) -> Scenario:
    """The scenario of a file with changes; FileError for the file's own mistakes, UsageError for a change's."""
    if not changes:
        return convert_node(node, Scenario, place, FORMAT)
    convert_node(node, Scenario, place, FORMAT)
    raw = copy.deepcopy(node.value)
    ways = [(change, _put(raw, change)) for change in changes]
    try:
        return msgspec.convert(raw, Scenario, strict=True)
    except msgspec.ValidationError as error:
        what, remedy = complaint(error, FORMAT)
        remedy = close_field(error, Scenario) or remedy
        culprit = [name or index for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", culprit_of(error))]
        guilty = [change for change, way in ways if way[: len(culprit)] == culprit[: len(way)]]
        change = (guilty or [change for change, _ in ways])[-1]
        raise UsageError(f"{change.option} {change}: {what}", remedy or "see docs/scenarios.md") from None


def _put(raw: Any, change: Change) -> list[str]:
    """Put the value where the path says; returns the path as indices and names of fields."""
    way: list[str] = []
    *names, last = change.path.split(".")
    for name in names:
        raw = _enter(raw, name, change, way)
    if isinstance(raw, list):
        raw[int(_index(raw, last, change, way))] = change.value
    else:
        raw[last] = change.value
        way.append(last)
    return way


def _enter(raw: Any, name: str, change: Change, way: list[str]) -> Any:
    if isinstance(raw, list):
        inner = raw[int(_index(raw, name, change, way))]
    else:
        inner = raw.setdefault(name, {})
        way.append(name)
    if not isinstance(inner, dict | list):
        raise UsageError(f"{change.option} {change}: {'.'.join(way)} has no fields", "end the path there")
    return inner


def _index(listed: list[Any], name: str, change: Change, way: list[str]) -> str:
    """The number of an element that is told by number or, where elements have names, by name."""
    names = [str(element.get("name", "")) if isinstance(element, dict) else "" for element in listed]
    index = names.index(name) if name in names else int(name) if name.isdigit() else len(listed)
    if index >= len(listed):
        known = ", ".join(filter(None, names)) or f"0 to {len(listed) - 1}"
        raise UsageError(f"{change.option} {change}: {'.'.join(way)} has no {name!r}", f"it has {known}")
    way.append(str(index))
    return str(index)
