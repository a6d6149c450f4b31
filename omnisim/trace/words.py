"""What msgspec found wrong, in our words."""

from __future__ import annotations

import re

import msgspec

from omnisim.trace.model import FORMAT

__all__ = ["complaint", "culprit_of", "path_of"]

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
        return f"format {what.removeprefix('Invalid enum value ')} is not known", f"this omnisim reads {wanted!r}"
    if "- at `key`" in text:
        path = f"a key of {path}" if path else "a key"
    where = f"{path}: " if path else ""
    return where + what[0].lower() + what[1:], _remedy(what)


def _remedy(what: str) -> str:
    if what.startswith("Expected str, got int"):
        return "put it in quotes"
    if "matching regex" in what:
        return "the pattern stands in the schema; of names, take letters, digits, dots, dashes and underscores"
    if "unknown field" in what:
        return "see the schema for the fields there are"
    if "missing required field" in what:
        return "add it"
    return ""
