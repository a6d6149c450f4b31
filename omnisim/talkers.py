"""Finds talkers by name or file, and reads them strictly."""

from __future__ import annotations

from difflib import get_close_matches
from math import prod
from pathlib import Path

from omnisim.errors import FileError, UsageError
from omnisim.talker import FORMAT, KeySpec, Talker
from omnisim.trace.yamlform import Node, convert_node, parse

__all__ = ["load_talker", "talker_names"]

_SUFFIXES = (".yaml", ".yml")
_MAX_ROW_ELEMENTS = 2**24


def load_talker(name: str) -> Talker:
    """The talker of this name, or in this file. UsageError for an unknown name, FileError for a file that is wrong."""
    if name.endswith(_SUFFIXES):
        return _read(Path(name))
    folder = _folder()
    if name not in talker_names():
        close = get_close_matches(name, talker_names(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(talker_names())}; or name a .yaml file"
        raise UsageError(f"unknown talker {name!r}", hint)
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
        node = parse(path)
    except FileNotFoundError:
        raise FileError(str(path), "no such talker file", f"talkers with a name: {', '.join(talker_names())}") from None
    except OSError as error:
        raise FileError(str(path), f"it cannot be read ({error.strerror})", "check its permissions") from None
    talker = convert_node(node, Talker, str(path), FORMAT)
    for key, spec in talker.keys.items():
        _check(key, spec, node.children["keys"].children[key], str(path))
    return talker


def _check(key: str, spec: KeySpec, node: Node, place: str) -> None:
    for wrong, what, remedy in (
        (key == "hidden_states", "hidden_states is not one of the keys", "hidden_size and dtype declare it"),
        (spec.deferred and (spec.kind != "row" or not spec.shape), "only rows with a shape can be deferred",
         "leave deferred out, or give a shape"),
        (spec.padded and spec.kind != "row", "only rows arrive padded", "leave padded out"),
        ((spec.kind == "nested") != bool(spec.fields), "fields are for kind nested, which needs some", "see KeySpec"),
        (spec.kind != "opaque" and spec.value is not None, "a value is for kind opaque", "leave it out"),
        (not spec.phases, "a key that is emitted in no phase", "leave phases out, or name prefill or decode"),
        (prod(spec.shape) > _MAX_ROW_ELEMENTS, f"a row of {prod(spec.shape):,} elements", "no model emits that"),
        (0 in spec.shape, "a shape with a 0 in it", "leave the key out"),
    ):  # fmt: skip
        if wrong:
            raise FileError(f"{place}:{node.line}", f"key {key!r}: {what}", remedy)
    for name, field in spec.fields.items():
        _check(f"{key}.{name}", field, node.children["fields"].children[name], place)
