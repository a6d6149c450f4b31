"""The seam between a replay and a cache: one adapter a generation of runners, behind these calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, Protocol

from omnisim.batch import Batch
from omnisim.rows.emit import ModelOutput
from omnisim.talker import Talker
from omnisim.trace.model import Geometry, Step

__all__ = ["LATER", "WRITE_MODES", "AtOnce", "Later", "Merged", "Setup", "Subject", "WriteMode"]

Merged = dict[str, dict[str, Any]]
"""Key to request id to what the request's consumer is handed; ``hidden_states`` is a key like others."""

WriteMode = Literal["pending", "sync", "off"]
WRITE_MODES: Final[tuple[WriteMode, ...]] = ("pending", "sync", "off")
"""How vllm-omni 0.24 to 0.28 write, see ``omnisim.subjects.release_024``; nothing else asks."""


class Later(Enum):
    """What ``deliver`` hands out of a step that is read in a later one."""

    LATER = "later"


LATER: Final = Later.LATER


@dataclass(frozen=True, slots=True)
class Setup:
    """What a runner knows when it makes its cache. ``device`` is where the model's outputs live.

    ``read_delay`` is how many steps later a runner that can read late does so.
    """

    geometry: Geometry
    talker: Talker
    device: str = "cpu"
    write_mode: WriteMode = "pending"
    read_delay: int = 0


class Subject(Protocol):
    """A cache under test, called as its runner calls it: ``open``, for each step the next four in order, ``close``.

    Whatever a subject raises ends its replay: an exception of a class in ``refusals`` is a refusal, any other a crash.
    Those in ``hangs`` only say that it waited in vain, and are crashes whatever they derive from.
    """

    name: str
    refusals: tuple[type[Exception], ...]
    hangs: tuple[type[Exception], ...]

    def open(self, setup: Setup) -> None:
        """Make the cache."""

    def finish(self, step: Step, batch: Batch) -> None:
        """Before the batch changes: requests of ``step.finished_req_ids`` may still be in it."""

    def begin(self, step: Step, batch: Batch) -> None:
        """The batch is this step's; the forward has not run."""

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged | Later:
        """The forward has run: store its rows, and hand out what each request is due."""

    def late(self, at_end: bool) -> Iterator[tuple[int, Merged]]:
        """What is handed out now of earlier steps, with their index; all that is left, once the trace has ended."""

    def close(self) -> None:
        """The replay is over, however it ended."""

    @property
    def holding(self) -> Collection[str] | None:
        """Requests for which the subject keeps deferred rows, None if it does not tell."""

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Rows ``written`` and ``served`` by key, as far as the subject counts them."""


class AtOnce:
    """What the adapters of runners without a late read share."""

    refusals: tuple[type[Exception], ...] = ()
    hangs: tuple[type[Exception], ...] = ()

    def late(self, at_end: bool) -> Iterator[tuple[int, Merged]]:
        return iter(())

    def close(self) -> None:
        pass
