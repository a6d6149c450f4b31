"""What a subject is given in a step, remembered, so that a change of it is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from omnisim.batch import Batch
from omnisim.compare import same_bytes
from omnisim.rows.emit import ModelOutput
from omnisim.trace.model import Step

__all__ = ["Inputs"]


class Inputs:
    """Copies of the model's output, of the step's slots and of the batch, taken before the subject is called."""

    def __init__(self, step: Step, batch: Batch, output: ModelOutput) -> None:
        self._num_requests = len(step.req_ids)
        self._given = (step, batch, output)
        self._tensors = {name: (tensor, tensor.clone()) for name, tensor in _tensors(output)}
        self._facts = dict(self._now())

    def changed(self) -> list[str]:
        """Names of what is no longer what it was."""
        tensors = [name for name, (tensor, copy) in self._tensors.items() if not same_bytes(tensor, copy)]
        facts = dict(self._now())
        return [*tensors, *(name for name, value in self._facts.items() if facts[name] != value)]

    def _now(self) -> Iterator[tuple[str, Any]]:
        step, batch, output = self._given
        input_batch, rows = batch.input_batch, self._num_requests
        yield "multimodal_outputs", _outline(output.multimodal_outputs)
        yield "slot_mapping", step.slot_mapping.tobytes()
        yield "req_ids", list(input_batch.req_ids)
        yield "num_computed_tokens_cpu", np.asarray(input_batch.num_computed_tokens_cpu[:rows]).tobytes()
        tables = input_batch.block_table.block_tables
        yield "block_table", [np.asarray(table.block_table.cpu[:rows]).tobytes() for table in tables]


def _tensors(output: ModelOutput) -> Iterator[tuple[str, Tensor]]:
    yield "hidden_states", output.hidden_states
    yield from _named(output.multimodal_outputs or {}, ())


def _named(values: Any, path: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in items:
        if isinstance(value, Tensor):
            yield ".".join((*path, str(name))), value
        elif isinstance(value, dict | list):
            yield from _named(value, (*path, str(name)))


def _outline(value: Any) -> Any:
    """Structure and everything that is not a tensor."""
    if isinstance(value, dict):
        return {name: _outline(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_outline(item) for item in value]
    return id(value) if isinstance(value, Tensor) else repr(value)
