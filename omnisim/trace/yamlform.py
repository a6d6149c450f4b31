"""YAML, for traces that people write: a small, strict part of it, read with the line of every value.

One document; no anchors, aliases, tags or duplicate keys. A plain word is a whole number, a decimal number, true,
false, null, or text: ``no`` and ``010`` are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import yaml

from omnisim.errors import FileError
from omnisim.trace.model import FORMAT, Header, StepRecord
from omnisim.trace.words import close_field, complaint, culprit_of

__all__ = ["Node", "YamlTrace", "convert_node", "parse", "parse_value", "read", "write"]

MAX_BYTES = 64 * 2**20
MAX_DEPTH = 32

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")
_DECIMAL = re.compile(r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?")

T = TypeVar("T")


class YamlTrace(Header, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A trace in YAML: the header's fields and either ``steps`` or a ``story`` (see ``omnisim.trace.story``)."""

    steps: tuple[StepRecord, ...] | None = None
    story: str | None = None


@dataclass(slots=True)
class Node:
    """A value of the file with the line it starts on, and the nodes of what it contains."""

    value: Any
    line: int
    children: dict[Any, Node] = field(default_factory=dict)
    is_block: bool = False

    def line_of(self, path: str) -> int:
        """The line of msgspec's ``$.steps[3].req_ids``; of the nearest node that contains it if there is none."""
        node = self
        for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
            child = node.children.get(name or int(index))
            if child is None:
                break
            node = child
        return node.line


def read(path: Path) -> tuple[Header, list[tuple[int, StepRecord]]]:
    """The header, and each record with its line; FileError for whatever is wrong with the file."""
    node = parse(path)
    trace = convert_node(node, YamlTrace, str(path))
    fields = {name: getattr(trace, name) for name in Header.__struct_fields__}
    header = Header(**fields)
    if (trace.steps is None) == (trace.story is None):
        raise FileError(f"{path}:{node.line}", "a trace has either steps or a story", "give one of the two")
    if trace.steps is not None:
        lines = [node.children["steps"].children[index].line for index in range(len(trace.steps))]
        return header, list(zip(lines, trace.steps, strict=True))
    from omnisim.trace.story import numbered_story

    story = node.children["story"]
    assert trace.story is not None
    return header, numbered_story(trace.story, header.cache, str(path), story.line + story.is_block)


def convert_node(node: Node, kind: type[T], place: str, wanted: str = FORMAT) -> T:
    """The node as a ``kind``; FileError with the line of what does not fit."""
    try:
        return msgspec.convert(node.value, kind, strict=True)
    except msgspec.ValidationError as error:
        what, remedy = complaint(error, wanted)
        remedy = close_field(error, kind) or remedy
        raise FileError(f"{place}:{node.line_of(culprit_of(error))}", what, remedy) from None


def parse(path: Path, wanted: str = FORMAT) -> Node:
    """The one document of the file as nodes; ``wanted`` is the format that it should be of."""
    if path.stat().st_size > MAX_BYTES:
        raise FileError(str(path), f"it is larger than {MAX_BYTES} bytes", "write so much as .jsonl")
    text, place = path.read_bytes(), str(path)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise FileError(f"{place}:{line}", f"byte {text[error.start]:#04x} is not UTF-8", "save it as UTF-8") from None
    try:
        return _document(yaml.parse(text, Loader=_LOADER), place, wanted)
    except yaml.MarkedYAMLError as error:
        raise FileError(f"{place}:{_line(error)}", f"this is not YAML ({error.problem})", "mind the indent") from None
    except yaml.YAMLError as error:
        raise FileError(
            f"{place}:1", f"this is not YAML ({' '.join(str(error).split())})", "write plain text"
        ) from None


def parse_value(text: str, place: str) -> Any:
    """The value of a piece of YAML as people write it on a command line; FileError for what ``parse`` refuses."""
    try:
        return _document(yaml.parse(text, Loader=_LOADER), place, "a value").value
    except yaml.YAMLError:
        raise FileError(place, f"{text!r} is not YAML", "put it in quotes, and mind the shell") from None


def _line(error: yaml.MarkedYAMLError) -> int:
    mark: Any = error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 1


def _starts_in(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1


def _document(events: Iterator[Any], place: str, wanted: str) -> Node:
    document: Node | None = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if document is not None:
                raise FileError(f"{place}:{_starts_in(event)}", "a second document starts here", "one trace a file")
            document = _Builder(events, place).node(next(events), 0)
    if document is None:
        raise FileError(f"{place}:1", "the file is empty", f"it starts with format: {wanted}")
    return document


class _Builder:
    """Turns events into nodes."""

    def __init__(self, events: Iterator[Any], place: str) -> None:
        self._events = events
        self._place = place

    def node(self, event: Any, depth: int) -> Node:
        line = _starts_in(event)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._error(line, f"{event.anchor!r} is an anchor or an alias", "write the value out")
        if event.tag is not None:
            raise self._error(line, f"{event.tag!r} is a tag", "leave it out")
        if depth > MAX_DEPTH:
            raise self._error(line, f"it is nested more than {MAX_DEPTH} deep", "no trace is")
        if isinstance(event, yaml.ScalarEvent):
            value = _plain(event.value) if event.style is None or event.style == "" else event.value
            return Node(value, line, is_block=event.style in ("|", ">"))
        return self._sequence(line, depth) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(line, depth)

    def _sequence(self, line: int, depth: int) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return Node([item.value for item in items], line, dict(enumerate(items)))

    def _mapping(self, line: int, depth: int) -> Node:
        children: dict[Any, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            if isinstance(key.value, list | dict):
                raise self._error(key.line, "a list or mapping is used as a key", "a key is a word or a number")
            if key.value in children:
                raise self._error(key.line, f"the key {key.value!r} is there twice", "keep one of them")
            children[key.value] = self.node(next(self._events), depth + 1)
        return Node({key: child.value for key, child in children.items()}, line, children)

    def _error(self, line: int, what: str, remedy: str) -> FileError:
        return FileError(f"{self._place}:{line}", what, remedy)


def _plain(text: str) -> str | int | float | bool | None:
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text) and len(text) < 40:
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def write(file: IO[bytes], header: Header, records: Iterable[StepRecord]) -> None:
    """Header and records as YAML, a field of a record on a line."""
    file.write(_dump(msgspec.to_builtins(header), flow=None) + b"steps:")
    indent, end = b"\n- ", b" []\n"
    for record in records:
        for name, value in msgspec.to_builtins(record).items():
            braced = _dump({name: value}, flow=True).strip()
            file.write(indent + braced[1:-1].replace(b"\n", b"\n  "))
            indent = b"\n  "
        indent, end = b"\n- ", b"\n"
    file.write(end)


def _dump(value: Any, flow: bool | None) -> bytes:
    dumped = yaml.dump(
        value, Dumper=_DUMPER, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=120, encoding="utf-8"
    )
    assert isinstance(dumped, bytes)
    return dumped
