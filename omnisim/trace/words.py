"""What msgspec found wrong, in our words."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import msgspec

from omnisim.trace.model import FORMAT

__all__ = ["close_field", "complaint", "culprit_of", "path_of"]

_PLACE = re.compile(r" - at `(?:key` in `)?(\$[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


def path_of(error: msgspec.ValidationError) -> str:
    """Where in the value it is, as ``$.steps[3].req_ids[0]``; ``$`` is the whole."""
    found = _PLACE.search(str(error))
    return found[1] if found else "$"


def culprit_of(error: msgspec.ValidationError) -> str:
    """Like ``path_of``; of a field that should not be there, its own."""
    unknown = _UNKNOWN.search(str(error))
    return f"{path_of(error)}.{unknown[1]}" if unknown else path_of(error)


def complaint(error: msgspec.ValidationError, wanted: str = FORMAT) -> tuple[str, str]:
    """What is wrong and the remedy, from an error of msgspec; ``wanted`` is the format that can be read."""
    text = str(error)
    what = _PLACE.sub("", text).replace("`", "")
    path = path_of(error).removeprefix("$").removeprefix(".")
    if path == "format" and what.startswith("Invalid enum value"):
        found = what.removeprefix("Invalid enum value ").strip("'")
        kind = _KINDS.get(found.partition("/")[0])
        if kind is not None and found.partition("/")[0] != wanted.partition("/")[0]:
            return f"this is {kind[0]}", kind[1]
        return f"format {found!r} is not known", f"this omnisim reads {wanted!r}"
    if "- at `key`" in text:
        path = f"a key of {path}" if path else "a key"
    where = f"{path}: " if path else ""
    return where + what[0].lower() + what[1:], _remedy(what)


def close_field(error: msgspec.ValidationError, kind: Any) -> str:
    """The remedy for a field that does not exist and is nearly one that does; else nothing."""
    unknown = _UNKNOWN.search(str(error))
    if unknown is None:
        return ""
    close = get_close_matches(unknown[1], _fields(msgspec.json.schema(kind)), n=1)
    if unknown[1] in close:
        return "it belongs in another place, see the schema"
    return f"did you mean {close[0]!r}?" if close else ""


def _fields(schema: Any) -> set[str]:
    """Names of all fields that a schema has anywhere."""
    if isinstance(schema, list):
        return set().union(*map(_fields, schema))
    if not isinstance(schema, dict):
        return set()
    names = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return names.union(*map(_fields, schema.values()))


_KINDS = {
    "omnisim-trace": ("a trace", "omnisim replay takes it"),
    "omnisim-talker": ("a talker", "it goes to --talker"),
    "omnisim-scenario": ("a scenario", "omnisim simulate makes a trace of it"),
    "omnisim-coverage-require": ("what coverage requires", "it goes to omnisim coverage --require"),
}


def _remedy(what: str) -> str:
    if what.startswith("Expected bool"):
        return "write true or false"
    if what.startswith("Expected str, got int"):
        return "put it in quotes"
    if "matching regex" in what:
        return "the pattern stands in the schema; of names, take letters, digits, dots, dashes and underscores"
    if "unknown field" in what:
        return "see the schema for the fields there are"
    if "missing required field" in what:
        return "add it"
    return ""
