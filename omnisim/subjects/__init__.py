"""What can be put under test. A subject is driven in the order in which its runner would call it.

builtin            our own cache
none               no cache at all: it proves that the judge can say no
vllm-omni:V        the cache of a release that ``omnisim subjects install`` has fetched
path:DIR           the cache of a vllm-omni that lies in a folder: an unpacked wheel, or a checkout
installed          the cache of the vllm-omni of this environment
module:Class       any class with the surface of ``OmniTensorPrefixCache``; file.py:Class too
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from omnisim.errors import UsageError
from omnisim.subjects import store
from omnisim.subjects.base import LATER, WRITE_MODES, Later, Merged, Setup, Subject, WriteMode
from omnisim.subjects.wheel import Wheel, find_installed

__all__ = [
    "LATER",
    "WRITE_MODES",
    "Later",
    "Merged",
    "Setup",
    "Subject",
    "WriteMode",
    "check_subject",
    "make_subject",
    "subject_names",
]


def _builtin() -> Subject:
    from omnisim.subjects.builtin import Builtin

    return Builtin()


def _none() -> Subject:
    from omnisim.subjects.none import KeepsNothing

    return KeepsNothing()


_SUBJECTS: dict[str, Callable[[], Subject]] = {"builtin": _builtin, "none": _none}


def subject_names() -> tuple[str, ...]:
    """Names of the subjects that are always there."""
    return tuple(_SUBJECTS)


def make_subject(name: str) -> Subject:
    """A fresh subject; UsageError for a name that is not known, SetupError for one that cannot be had here."""
    if name in _SUBJECTS:
        return _SUBJECTS[name]()
    if (wheel := _wheel(name)) is not None:
        return _release(wheel)
    from omnisim.subjects.foreign import load_foreign

    return load_foreign(name)


def check_subject(name: str) -> None:
    """Raise what can be known of a name without running any of the code it stands for."""
    if name not in _SUBJECTS:
        _wheel(name)


def _wheel(name: str) -> Wheel | None:
    """The release that a name stands for; None for one of a class."""
    kind, colon, rest = name.partition(":")
    if kind == "path" and colon:
        return Wheel(Path(rest), name)
    if kind == "vllm-omni" and colon:
        return Wheel(store.folder(rest), name)
    if name == "installed":
        return Wheel(find_installed()[0], name)
    if not colon or not rest.isidentifier():
        known = [*_SUBJECTS, "installed"]
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"unknown subject {name!r}", f"{hint}known: {', '.join(known)}, vllm-omni:V, path:DIR, module:Class"
        )
    return None


def _release(wheel: Wheel) -> Subject:
    """The adapter for the generation of a release, told by what is in it and not by its number."""
    if wheel.is_package:
        from omnisim.subjects.release_030 import Release030

        return Release030(wheel)
    cache_class = wheel.module("core.prefix_cache").OmniTensorPrefixCache
    if hasattr(cache_class, "schedule_async_write"):
        from omnisim.subjects.release_024 import Release024

        return Release024(wheel)
    if hasattr(cache_class, "stage_deferred_mm_outputs"):
        from omnisim.subjects.release_022 import Release022

        return Release022(wheel)
    from omnisim.subjects.release_020 import Release020

    return Release020(wheel)
