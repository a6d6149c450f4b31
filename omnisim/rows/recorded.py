"""Hidden states that a real engine computed, judged against the same requests run with prefix caching off.

Both runs are recordings, so the two rows of one position are two computations: their batches had other shapes, and they
agree within rounding. Rows are matched by content name, that is by the token ids (and content tags) up to their
position. Whatever is wrong with the files is said when the rows are made; only the run's own tensors are held against
its steps one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
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

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What safetensors calls those for which a tolerance is stated."""


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
        no_cache = _Tensors(path.with_name(recorded.no_cache_tensors))
        if no_cache.form != self._tensors.form:
            raise CannotJudge(
                f"{self._tensors.path} has rows {self._tensors.form}, and {no_cache.path} {no_cache.form}",
                "record both runs with one model",
            )
        super().__init__(_with_hidden(talker, self._tensors.form), device)
        self._tolerance = TOLERANCES[self._tensors.form.dtype]
        self._truth = _Truth(trace, path.with_name(recorded.no_cache_trace), no_cache)

    def forward(self, step: Step, names_T: NameArray) -> ModelOutput:
        output = super().forward(step, names_T)
        recorded = self._tensors.of(step)
        output.hidden_states[: len(recorded)].copy_(recorded)
        return output

    def pristine(self, key: str, step: Step, names_T: NameArray) -> Tensor:
        return self._tensors.of(step) if key == HIDDEN_STATES else super().pristine(key, step, names_T)

    def due_rows(self, key: str, names: NameArray) -> Tensor:
        return self._truth.rows_of(names) if key == HIDDEN_STATES else super().due_rows(key, names)

    def tolerance(self, key: str) -> tuple[float, float] | None:
        return self._tolerance if key == HIDDEN_STATES else None

    def classify(self, key: str, row: Tensor) -> tuple[RowKind, int | None]:
        """A recorded row carries no name: the no-cache row that it agrees with gives it one."""
        kind, name = super().classify(key, row)
        if key != HIDDEN_STATES or kind != "other":
            return kind, name
        name = self._truth.name_of(row, *self._tolerance)
        return ("other", None) if name is None else ("row", name)

    def narrow_keys(self) -> dict[str, int]:
        return {key: bits for key, bits in super().narrow_keys().items() if key != HIDDEN_STATES}


class _Form(NamedTuple):
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.width} wide, {str(self.dtype).removeprefix('torch.')}"


def _with_hidden(talker: Talker, form: _Form) -> Talker:
    return msgspec.structs.replace(talker, hidden_size=form.width, dtype=str(form.dtype).removeprefix("torch."))


class _Tensors:
    """The tensors ``step_00000`` ... of one file, all ``[tokens, width]`` of one dtype, read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _open(path)
            names: list[str] = self._file.keys()
        except FileNotFoundError:
            raise FileError(str(path), "no such file", "the trace names it for its recorded rows") from None
        except OSError as error:
            raise FileError(str(path), f"it cannot be read ({error})", "check the path and its permissions") from None
        except SafetensorError as error:
            raise FileError(str(path), f"not a safetensors file ({error})", "record it again") from None
        self._names = frozenset(name for name in names if name.startswith("step_"))
        self.form = self._common_form()

    def _common_form(self) -> _Form:
        """The form of all tensors, from the head of the file: no row is read."""
        if not self._names:
            raise FileError(str(self.path), "no tensor step_00000", "the tensors are of another trace")
        names: dict[_Form, str] = {}
        for name in sorted(self._names):
            names.setdefault(self._form_of(name), name)
        form, *others = names
        if others:
            what = f"{names[form]} is {form}, and {names[others[0]]} {others[0]}"
            raise FileError(str(self.path), what, "all rows of a model are of one form")
        return form

    def _form_of(self, name: str) -> _Form:
        tensor = self._file.get_slice(name)
        shape, dtype = tensor.get_shape(), tensor.get_dtype()
        if len(shape) != 2 or not shape[1]:
            raise FileError(str(self.path), f"{name} has shape {shape}", "hidden states are [tokens, hidden_size]")
        if dtype not in _DTYPES:
            what = f"no tolerance is stated for the dtype of {name}, {dtype}"
            raise FileError(str(self.path), what, f"it is one of {', '.join(_DTYPES)}")
        return _Form(shape[1], _DTYPES[dtype])

    def of(self, step: Step) -> Tensor:
        """The rows of a step in batch order; a step without tokens need not have a tensor."""
        name = f"step_{step.index:05d}"
        if not step.num_tokens:
            return torch.empty(0, self.form.width, dtype=self.form.dtype)
        if name not in self._names:
            raise FileError(str(self.path), f"no tensor {name}", "the tensors are of another trace")
        rows: Tensor = self._file.get_tensor(name)
        if len(rows) != step.num_tokens:
            raise CannotJudge(
                f"{self.path}: {len(rows)} rows recorded for step {step.index}, which has {step.num_tokens} tokens",
                "the tensors are of another trace",
            )
        if rows.isnan().any():
            raise FileError(str(self.path), f"{name} holds NaN, which equals nothing", "record it again")
        return rows


def _open(path: Path) -> Any:
    """Untyped, for the types that safetensors gives differ between its releases."""
    return safe_open(str(path), framework="pt")


class _Truth:
    """The rows of the run without a cache, ``[N, width]``, under their names; of two of one name the first."""

    def __init__(self, trace: Trace, path: Path, tensors: _Tensors) -> None:
        self._of = tensors.path
        names, rows = _read_truth(trace, path, tensors)
        kept = np.sort(np.unique(names, return_index=True)[1])
        self._names = names[kept]
        self._rows = rows[torch.from_numpy(kept)]
        self._order = np.argsort(self._names)

    def rows_of(self, names: NameArray) -> Tensor:
        at = self._order.take(np.searchsorted(self._names, names, sorter=self._order), mode="clip")
        missing = names[self._names[at] != names]
        if len(missing):
            raise CannotJudge(
                f"{self._of} has no row named {missing[0]:#x}: the two runs are not of the same requests and tokens",
                "record both with the same requests, greedy and with one seed",
            )
        return self._rows[torch.from_numpy(at)]

    def name_of(self, row: Tensor, rtol: float, atol: float) -> int | None:
        """The name of the first row that ``row`` agrees with; the first column alone rules most of them out."""
        near = torch.isclose(row[0], self._rows[:, 0], rtol=rtol, atol=atol).nonzero().flatten()
        found = near[torch.isclose(row, self._rows[near], rtol=rtol, atol=atol).all(dim=1)]
        return int(self._names[int(found[0])]) if len(found) else None


def _read_truth(trace: Trace, path: Path, tensors: _Tensors) -> tuple[NameArray, Tensor]:
    """Names ``[N]`` and rows ``[N, width]`` of all positions that the run without a cache computed, in its order."""
    names = ContentNames()
    with _as_truth_of(trace):
        truth = load(path)
        if truth.header.content != trace.header.content:
            raise FileError(str(path), f"its content is {truth.header.content!r}, not {trace.header.content!r}")
        parts = [(names.advance(step), tensors.of(step)) for step in truth.steps()]
        if not any(len(named) for named, _ in parts):
            raise FileError(str(path), "it computes no row")
    return np.concatenate([named for named, _ in parts]), torch.cat([rows for _, rows in parts])


@contextmanager
def _as_truth_of(trace: Trace) -> Iterator[None]:
    """What is wrong with the other run's files says what they are read for."""
    try:
        yield
    except FileError as error:
        what = error.what.removeprefix(f"{error.place}: ")
        raise FileError(error.place, what, f"the recorded rows of {trace.path} are judged against it") from None
