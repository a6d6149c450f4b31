"""What was handed out and was right, kept for a while, so that a change of it is seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnisim.compare import same_bytes
from omnisim.truth import Due

__all__ = ["Handed", "HandedOut"]

WINDOW_NBYTES = 32 * 2**20
WINDOW_STEPS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Handed:
    """Outputs of one key in one step, by row of the batch, with a copy of them all.

    All have one dtype and trailing shape.
    """

    due: Due
    key: str
    rows: Sequence[int]
    values: Sequence[Tensor]
    copy: Tensor

    def changed(self) -> Iterator[tuple[int, Tensor]]:
        """Rows of the batch whose output is no longer what it was, with the output."""
        if same_bytes(torch.cat(list(self.values)), self.copy):
            return
        copies = torch.split(self.copy, [len(value) for value in self.values])
        for row, value, copy in zip(self.rows, self.values, copies, strict=True):
            if not same_bytes(value, copy):
                yield row, value


class HandedOut:
    """Looks at each output twice more: one step later, and when it has been kept long enough or the run ends.

    It keeps at most ``WINDOW_STEPS`` steps and ``WINDOW_NBYTES`` bytes of copies.
    """

    def __init__(self) -> None:
        self._last: list[Handed] = []
        self._kept: deque[Handed] = deque()
        self._kept_nbytes = 0

    def add(self, handed: Handed) -> None:
        """Remember outputs of the step that is being judged."""
        self._last.append(handed)

    def next_step(self, index: int) -> Iterator[tuple[Handed, int, Tensor]]:
        """What has changed of the step before, and of what is dropped now."""
        for handed in self._last:
            changed = list(handed.changed())
            if changed:
                yield from ((handed, row, value) for row, value in changed)
            else:
                self._kept.append(handed)
                self._kept_nbytes += handed.copy.nbytes
        self._last = []
        while self._kept and (self._kept_nbytes > WINDOW_NBYTES or self._kept[0].due.step.index < index - WINDOW_STEPS):
            yield from self._drop()

    def end(self) -> Iterator[tuple[Handed, int, Tensor]]:
        """What has changed of everything that is still kept."""
        self._kept.extend(self._last)
        self._last = []
        while self._kept:
            yield from self._drop()

    def _drop(self) -> Iterator[tuple[Handed, int, Tensor]]:
        handed = self._kept.popleft()
        self._kept_nbytes -= handed.copy.nbytes
        for row, value in handed.changed():
            yield handed, row, value
