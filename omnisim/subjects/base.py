"""The seam between a replay and a cache: one adapter a generation of runners, behind these four calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from omnisim.batch import Batch
from omnisim.rows.emit import ModelOutput
from omnisim.talker import Talker
from omnisim.trace.model import Geometry, Step

__all__ = ["Merged", "Setup", "Subject"]

Merged = dict[str, dict[str, Any]]
"""Key to request id to what the request's consumer is handed; ``hidden_states`` is a key like others."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a runner knows when it makes its cache. ``device`` is where the model's outputs live."""

    geometry: Geometry
    talker: Talker
    device: str = "cpu"


class Subject(Protocol):
    """A cache under test, called as its runner calls it: ``open`` once, then for each step the three others in order.

    Whatever a subject raises ends its replay: an exception of a class in ``refusals`` is a refusal, any other a crash.
    """

    name: str
    refusals: tuple[type[Exception], ...]

    def open(self, setup: Setup) -> None:
        """Make the cache."""

    def finish(self, step: Step, batch: Batch) -> None:
        """Before the batch changes: requests of ``step.finished_req_ids`` may still be in it."""

    def begin(self, step: Step, batch: Batch) -> None:
        """The batch is this step's; the forward has not run."""

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged:
        """The forward has run: store its rows, and hand out what each request is due."""

    @property
    def holding(self) -> Collection[str] | None:
        """Requests for which the subject keeps deferred rows, None if it does not tell."""

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Rows ``written`` and ``served`` by key, as far as the subject counts them."""
