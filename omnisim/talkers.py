"""Finds talkers by name or file, and reads them strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path

from omnisim.errors import FileError, UsageError
from omnisim.talker import FORMAT, KeySpec, Talker
from omnisim.trace.yamlform import Node, convert_node, parse

__all__ = ["check_talker", "load_talker", "talker_names"]

_SUFFIXES = (".yaml", ".yml")
_MAX_ROW_ELEMENTS = 2**24


def load_talker(name: str) -> Talker:
    """The talker of this name, or in this file. UsageError for an unknown name, FileError for a file that is wrong."""
    if name.endswith(_SUFFIXES):
        return _read(Path(name))
    folder = _folder()
    if name not in talker_names():
        close = get_close_matches(name, talker_names(), n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"unknown talker {name!r}", f"{meant}known: {', '.join(talker_names())}; or name a .yaml file")
    return _read(folder / f"{name}.yaml")


def talker_names() -> tuple[str, ...]:
    """Names of the talkers that come with omnisim."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def _folder() -> Path:
    """``scenarios/talkers`` of an installed wheel, else of the checkout."""
    package = Path(__file__).parent
    installed = package / "_scenarios" / "talkers"
    return installed if installed.is_dir() else package.parent / "scenarios" / "talkers"


def _read(path: Path) -> Talker:
    try:
        node = parse(path, FORMAT)
    except FileNotFoundError:
        raise FileError(str(path), "no such talker file", f"talkers with a name: {', '.join(talker_names())}") from None
    except OSError as error:
        raise FileError(str(path), f"it cannot be read ({error.strerror})", "check its permissions") from None
    talker = convert_node(node, Talker, str(path), FORMAT)
    for place, what, remedy in _faults(talker):
        raise FileError(f"{path}:{_line_of(node, place)}", what, remedy)
    _check_values(talker.keys, node.children.get("keys"), str(path))
    for step, specs in talker.changes.items():
        _check_values(specs, node.children["changes"].children[step], str(path))
    return talker


def check_talker(talker: Talker, place: str) -> None:
    """FileError, at ``place``, for a talker that reads well and cannot be: for one that stands in a trace."""
    for _, what, remedy in _faults(talker):
        raise FileError(place, f"talker {talker.name!r}, {what}", remedy)


Place = tuple[str | int, ...]
"""Names that lead to a value of the file: of a key, and of the fields and steps that it is in."""
Fault = tuple[Place, str, str]
"""Where something is wrong, what it is, and the remedy."""


def _faults(talker: Talker) -> Iterator[Fault]:
    if "hidden_states" in talker.keys:
        what = "key 'hidden_states': hidden_states is not one of the keys"
        yield ("keys", "hidden_states"), what, "hidden_size and dtype declare it"
    for name, spec in talker.keys.items():
        yield from _faults_of(("keys",), (name,), spec)
    for step, specs in talker.changes.items():
        for name, spec in specs.items():
            place = ("changes", step)
            yield from _faults_of(place, (name,), spec)
            if (fault := _fault_of_change(name, spec, talker)) is not None:
                yield (*place, name), f"key {name!r} changes in step {step}: {fault}", "see Talker.changes"


def _fault_of_change(name: str, spec: KeySpec, talker: Talker) -> str | None:
    has_rows = spec.kind == "row" and bool(spec.shape)
    if name == "hidden_states":
        return None if has_rows else "hidden states are rows with a shape"
    if name not in talker.keys:
        return "it is not one of the keys"
    had_rows = talker.keys[name].kind == "row" and bool(talker.keys[name].shape)
    return "only a key that is declared as rows with a shape can become one" if has_rows and not had_rows else None


def _faults_of(place: Place, names: tuple[str, ...], spec: KeySpec) -> Iterator[Fault]:
    nested, is_field = spec.kind == "nested", len(names) > 1
    for wrong, what, remedy in (
        (spec.deferred and (spec.kind != "row" or not spec.shape), "only rows with a shape can be deferred",
         "leave deferred out, or give a shape"),
        (spec.deferred and is_field, "only a whole key can be deferred", "leave deferred out"),
        (spec.padded and spec.kind != "row", "only rows arrive padded", "leave padded out"),
        (spec.filled != "every" and (spec.kind != "row" or not spec.shape), "only rows with a shape can be left zeros",
         "leave filled out"),
        (spec.entries is not None and spec.kind != "list", "only a list can be short of entries", "leave entries out"),
        (nested != bool(spec.fields), "fields are for kind nested, which needs some", "see KeySpec"),
        (spec.kind != "opaque" and spec.value is not None, "a value is for kind opaque", "leave it out"),
        (not spec.phases, "a key that is emitted in no phase", "leave phases out, or name prefill or decode"),
        (is_field and len(set(spec.phases)) == 1, "a field is emitted whenever its key is",
         f"give {names[0]!r} the phases"),
        (prod(spec.shape) > _MAX_ROW_ELEMENTS, f"a row of {prod(spec.shape):,} elements", "no model emits that"),
        (0 in spec.shape, "a shape with a 0 in it", "leave the key out"),
    ):  # fmt: skip
        if wrong:
            yield (*place, names[-1]), f"key {'.'.join(names)!r}: {what}", remedy
    for name, field in spec.fields.items():
        yield from _faults_of((*place, names[-1], "fields"), (*names, name), field)


def _check_values(specs: Mapping[str, KeySpec], node: Node | None, place: str) -> None:
    """An opaque key says its value, null too: a default would hide that it was forgotten."""
    for name, spec in specs.items():
        assert node is not None
        own = node.children[name]
        if spec.kind == "opaque" and "value" not in own.children:
            raise FileError(f"{place}:{own.line}", f"key {name!r}: kind opaque needs a value", "value: null is one too")
        _check_values(spec.fields, own.children.get("fields"), place)


def _line_of(node: Node, place: Place) -> int:
    """The line of the value at this place."""
    for name in place:
        node = node.children[name]
    return node.line
