"""Every error omnisim raises on purpose, sorted by who must act.

    OmnisimError
    ├── UsageError            whoever typed the command: a name or an option that does not exist
    ├── FileError             whoever wrote the file: it is missing, damaged, or not what it should be
    │   └── IllegalSchedule   ... it reads well, but what it tells cannot have happened
    ├── SetupError            whoever owns the machine: an extra, a device or the memory is missing
    └── CannotJudge           whoever chose the combination: this trace cannot be judged under these options

What the code *under test* raises is not here: it is an outcome, not an error. The refusals of our own cache are in
``omnisim.cache.errors``, so that the cache can be used alone.
"""

from __future__ import annotations

__all__ = ["CannotJudge", "FileError", "IllegalSchedule", "OmnisimError", "SetupError", "UsageError"]


class OmnisimError(Exception):
    """One line for a person: what is wrong and, after ``remedy``, what to do."""

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}; {remedy}" if remedy else what)


class UsageError(OmnisimError):
    """A name or an option that does not exist."""


class FileError(OmnisimError):
    """A file that cannot be used; ``place`` is ``file`` or ``file:line``."""

    def __init__(self, place: str, what: str, remedy: str = "") -> None:
        self.place = place
        super().__init__(f"{place}: {what}", remedy)


class IllegalSchedule(FileError):
    """A trace that reads well and tells what cannot have happened."""


class SetupError(OmnisimError):
    """Something this machine lacks: an extra, a device, memory."""


class CannotJudge(OmnisimError):
    """A trace and options that are each fine and do not fit together."""
