"""Where the rows of a replay come from: what the model emits in a step, and what of it each request is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from omnisim.rows.emit import ModelOutput
from omnisim.rows.encode import RowKind
from omnisim.talker import Talker
from omnisim.trace.model import Step

__all__ = ["RowSource"]


class RowSource(Protocol):
    """The model's side of a replay. Keys are those that reach a consumer, ``hidden_states`` among them if it does."""

    talker: Talker
    row_keys: Sequence[str]
    """Keys with a row a token, which a cache must keep."""

    def emitted_keys(self, step: Step) -> Sequence[str]:
        """Keys that the model emits in this step."""

    def forward(self, step: Step, names_T: NDArray[np.uint64]) -> ModelOutput:
        """What the model emits: live buffers, which the next forward overwrites."""

    def pristine(self, key: str, step: Step, names_T: NDArray[np.uint64]) -> Tensor:
        """The rows of ``key`` that ``forward`` put into the live buffer, made again (CPU)."""

    def named(self, key: str, names: NDArray[np.uint64], lasts: NDArray[np.bool_]) -> NDArray[np.uint64]:
        """What names rows of ``key``: ``names``, but ``BLANK`` for a row that the model leaves zeros."""

    def due_rows(self, key: str, names: NDArray[np.uint64]) -> Tensor:
        """The rows due for these names (CPU)."""

    def tolerance(self, key: str) -> tuple[float, float] | None:
        """``(rtol, atol)`` where a due row is another computation of the same row, None where it must be equal."""

    def value_for(self, key: str, step: Step, row: int) -> Any:
        """What request ``row`` of the batch is due of a key that is not cached."""

    def classify(self, key: str, row: Tensor) -> tuple[RowKind, int | None]:
        """What a received row is, and the name that it carries."""

    def row_nbytes(self, key: str) -> int:
        """Bytes of one row."""

    def narrow_keys(self) -> dict[str, int]:
        """Keys whose rows are too narrow to name their owner for certain, with the bits that they carry."""

    def clobber(self) -> None:
        """Overwrite all live buffers, as the next forward would."""
