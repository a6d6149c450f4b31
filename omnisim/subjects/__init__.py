"""What can be put under test. A subject is driven in the order in which its runner would call it."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from omnisim.errors import UsageError
from omnisim.subjects.base import Merged, Setup, Subject

__all__ = ["Merged", "Setup", "Subject", "make_subject", "subject_names"]


def _builtin() -> Subject:
    from omnisim.subjects.builtin import Builtin

    return Builtin()


def _none() -> Subject:
    from omnisim.subjects.none import KeepsNothing

    return KeepsNothing()


_SUBJECTS: dict[str, Callable[[], Subject]] = {"builtin": _builtin, "none": _none}


def subject_names() -> tuple[str, ...]:
    """Names that ``make_subject`` takes."""
    return tuple(_SUBJECTS)


def make_subject(name: str) -> Subject:
    """A fresh subject; UsageError for a name that is not known."""
    if name not in _SUBJECTS:
        close = get_close_matches(name, _SUBJECTS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(_SUBJECTS)}"
        raise UsageError(f"unknown subject {name!r}", hint)
    return _SUBJECTS[name]()
