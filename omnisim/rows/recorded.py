"""Hidden states that a real engine computed, judged against the same requests run with prefix caching off.

Both runs are recordings, so the two rows of one position are two computations: their batches had other shapes, and they
agree within rounding. Rows are matched by content name, that is by the token ids up to their position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omnisim.errors import CannotJudge, FileError
from omnisim.rows.emit import HIDDEN_STATES, ModelOutput, OwnerRows
from omnisim.rows.encode import RowKind
from omnisim.rows.naming import ContentNames, NameArray
from omnisim.talker import Talker
from omnisim.trace import Trace, load
from omnisim.trace.model import Step

__all__ = ["TOLERANCES", "RecordedRows"]

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float16: (1e-3, 1e-5),
}
"""``(rtol, atol)`` by dtype: the defaults that torch documents for ``torch.testing.assert_close``."""


class RecordedRows(OwnerRows):
    """The hidden states of a recording; all other keys of the talker are rows that name their owner."""

    def __init__(self, trace: Trace, talker: Talker, device: str = "cpu") -> None:
        recorded, path = trace.header.recorded_rows, Path(trace.path)
        if recorded is None:
            raise CannotJudge(f"{path}: the trace has no recorded rows", "use --rows owner")
        if not talker.requires_full_prefix_cached_hidden_states:
            raise CannotJudge(
                f"the recorded rows of {path} are hidden states, and talker {talker.name!r} delivers none",
                "use a talker that does, or --rows owner",
            )
        self._tensors = _Tensors(path.with_name(recorded.tensors))
        first = self._tensors.step(0)
        name = str(first.dtype).removeprefix("torch.")
        super().__init__(_with_hidden(talker, first.shape[1], name), device)
        self._dtype = first.dtype
        truth = load(path.with_name(recorded.no_cache_trace))
        self._truth = _rows_by_name(truth, _Tensors(path.with_name(recorded.no_cache_tensors)))

    def forward(self, step: Step, names_T: NameArray) -> ModelOutput:
        output = super().forward(step, names_T)
        recorded = self._recorded(step)
        output.hidden_states[: len(recorded)].copy_(recorded)
        return output

    def _recorded(self, step: Step) -> Tensor:
        rows = self._tensors.step(step.index)
        if len(rows) != step.num_tokens:
            raise CannotJudge(
                f"{self._tensors.path}: {len(rows)} rows recorded for step {step.index}, which has {step.num_tokens} "
                "tokens",
                "the tensors are of another trace",
            )
        return rows

    def pristine(self, key: str, step: Step, names_T: NameArray) -> Tensor:
        return self._recorded(step) if key == HIDDEN_STATES else super().pristine(key, step, names_T)

    def due_rows(self, key: str, names: NameArray) -> Tensor:
        if key != HIDDEN_STATES:
            return super().due_rows(key, names)
        try:
            return torch.stack([self._truth[name] for name in names.tolist()])
        except KeyError as missing:
            raise CannotJudge(
                f"the no-cache run of {self._tensors.path} has no row named {missing.args[0]:#x}: the two runs are not "
                "of the same requests and tokens",
                "record both with the same requests, greedy and with one seed",
            ) from None

    def tolerance(self, key: str) -> tuple[float, float] | None:
        return TOLERANCES.get(self._dtype) if key == HIDDEN_STATES else None

    def classify(self, key: str, row: Tensor) -> tuple[RowKind, int | None]:
        """A recorded row carries no name: the no-cache row that it agrees with gives it one."""
        kind, name = super().classify(key, row)
        if key != HIDDEN_STATES or kind != "other":
            return kind, name
        rtol, atol = TOLERANCES[self._dtype]
        close = (name for name, due in self._truth.items() if torch.allclose(row, due, rtol=rtol, atol=atol))
        name = next(close, None)
        return ("other", None) if name is None else ("row", name)

    def narrow_keys(self) -> dict[str, int]:
        return {key: bits for key, bits in super().narrow_keys().items() if key != HIDDEN_STATES}


class _Tensors:
    """The tensors ``step_00000`` ... of one file, read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _open(path)
            self._names = frozenset[str](self._file.keys())
        except FileNotFoundError:
            raise FileError(str(path), "no such file", "the trace names it for its recorded rows") from None
        except SafetensorError as error:
            raise FileError(str(path), f"not a safetensors file ({error})", "record it again") from None

    def step(self, index: int) -> Tensor:
        name = f"step_{index:05d}"
        if name not in self._names:
            raise FileError(str(self.path), f"no tensor {name}", "the tensors are of another trace")
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


def _open(path: Path) -> Any:
    """Untyped, for the types that safetensors gives differ between its releases."""
    return safe_open(str(path), framework="pt")


def _rows_by_name(trace: Trace, tensors: _Tensors) -> dict[int, Tensor]:
    names = ContentNames()
    rows: dict[int, Tensor] = {}
    for step in trace.steps():
        for name, row in zip(names.advance(step).tolist(), tensors.step(step.index), strict=True):
            rows.setdefault(name, row)
    return rows


def _with_hidden(talker: Talker, hidden_size: int, dtype: str) -> Talker:
    return msgspec.structs.replace(talker, hidden_size=hidden_size, dtype=dtype)
