"""What a declared model emits in a step, in rows that name their owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnisim.errors import CannotJudge
from omnisim.rows.encode import (
    BLANK,
    NARROW,
    RowKind,
    classify,
    encode,
    identity_bits,
    key_salt,
    padding_like,
    torch_dtype,
)
from omnisim.rows.naming import NameArray
from omnisim.talker import KeySpec, Talker
from omnisim.trace.model import Step

__all__ = ["HIDDEN_STATES", "NOTHING", "ModelOutput", "Nothing", "OwnerRows"]

HIDDEN_STATES: Final = "hidden_states"


class Nothing(Enum):
    """What a request is due of a key that has no value for it."""

    NOTHING = "nothing"


NOTHING: Final = Nothing.NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """What a forward returns: ``hidden_states`` ``[P, hidden_size]`` (or T rows), and the flattened payload or None."""

    hidden_states: Tensor
    multimodal_outputs: dict[str, Any] | None


class OwnerRows:
    """Emits what a talker declares; a ``RowSource``.

    Rows lie in live buffers on ``device``. The next forward overwrites them, and whatever else the last one returned,
    like the static outputs of a CUDA graph.
    """

    def __init__(self, talker: Talker, device: str = "cpu") -> None:
        self.talker = talker
        self._device = device
        hidden = KeySpec(kind="row", shape=(talker.hidden_size,), dtype=talker.dtype, padded=talker.hidden_padded)
        self._specs = {HIDDEN_STATES: hidden, **talker.keys}
        self._changes = sorted(talker.changes.items())
        self._salts = {key: key_salt(key) for key in self._specs}
        self.row_keys = self._row_keys()
        self._live: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._made_for: NameArray | None = None
        self._requests: dict[str, int] = {}
        self._returned: list[Tensor] = []
        changed = (spec for specs in talker.changes.values() for spec in specs.values())
        self._in_all_phases = all(len(set(spec.phases)) == 2 for spec in (*self._specs.values(), *changed))

    def _row_keys(self) -> Sequence[str]:
        """Keys with a row a token that reach a consumer."""
        needs_hidden = self.talker.requires_full_prefix_cached_hidden_states
        cached = [key for key in self.talker.keys if (spec := self._specs[key]).kind == "row" and spec.shape]
        return [HIDDEN_STATES, *cached] if needs_hidden else cached

    # What is emitted

    def emitted_keys(self, step: Step) -> Sequence[str]:
        self._change(step)
        phases = self._phases(step)
        keys = [
            key
            for key in self.talker.keys
            if key not in step.absent_keys and not phases.isdisjoint(self._specs[key].phases)
        ]
        return [HIDDEN_STATES, *keys] if self.talker.requires_full_prefix_cached_hidden_states else keys

    def _change(self, step: Step) -> None:
        """Take up what the talker emits otherwise from this step on."""
        while self._changes and self._changes[0][0] <= step.index:
            self._specs.update(self._changes.pop(0)[1])
            self.row_keys = self._row_keys()

    def forward(self, step: Step, names_T: NameArray) -> ModelOutput:
        self._made, self._made_for = {}, names_T
        self._name_requests(step)
        emitted = [key for key in self.emitted_keys(step) if key != HIDDEN_STATES]
        self.clobber()
        payload = {key: self._value(key, self._specs[key], step, names_T) for key in emitted}
        hidden = self._rows(HIDDEN_STATES, self._specs[HIDDEN_STATES], step, names_T)
        self._returned = [hidden, *_tensors(payload.values())]
        return ModelOutput(hidden, payload if payload or self.talker.when_empty == "empty" else None)

    def _name_requests(self, step: Step) -> None:
        """A request has one name over its life, and another than one of its id that was before it."""
        for req_id in step.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            self._requests[new.req_id] = key_salt(f"{step.index} {new.req_id}")

    def _request_names(self, req_ids: Sequence[str]) -> NameArray:
        return np.array([self._requests[req_id] for req_id in req_ids], dtype=np.uint64)

    def _phases(self, step: Step) -> set[str]:
        if self._in_all_phases:
            return {"prefill", "decode"}
        decoding = self._decoding(step)
        return {name for name, some in (("decode", decoding.any()), ("prefill", not decoding.all())) if some}

    def _decoding(self, step: Step) -> NDArray[np.bool_]:
        prompts = np.array(step.num_prompt_tokens, dtype=np.int64)
        if (prompts < 0).any():
            unknown = step.req_ids[int((prompts < 0).argmax())]
            raise CannotJudge(
                f"talker {self.talker.name!r} emits by phase, and the trace does not say where the prompt of "
                f"{unknown!r} ends",
                "give num_prompt_tokens in scheduled_new_reqs, or use a talker whose keys are emitted in all phases",
            )
        decoding: NDArray[np.bool_] = np.array(step.num_computed_tokens, dtype=np.int64) >= prompts
        return decoding

    def _value(self, key: str, spec: KeySpec, step: Step, names_T: NameArray) -> Any:
        match spec.kind:
            case "row":
                return self._rows(key, spec, step, names_T)
            case "decode-row":
                starts = np.array(step.query_start_loc[:-1], dtype=np.int64)[self._decoding(step)]
                return self._encode(key, spec, names_T[starts]).to(self._device)
            case "request":
                return self._encode(key, spec, self._request_names(step.req_ids)).to(self._device)
            case "list":
                return list(self._encode(key, spec, self._request_names(step.req_ids[: spec.entries])).to(self._device))
            case "shared":
                return self._shared(key, spec).to(self._device)
            case "list-of-one":
                return [self._shared(key, spec).to(self._device)]
            case "nested":
                return {name: self._value(f"{key}.{name}", field, step, names_T) for name, field in spec.fields.items()}
            case "opaque":
                return spec.value

    def _rows(self, key: str, spec: KeySpec, step: Step, names_T: NameArray) -> Tensor:
        """The step's rows in the live buffer of ``key``, padded if the key is."""
        rows = self._made[key] = self._encode(key, spec, _named(spec, names_T, step))
        num_rows = step.num_tokens_padded if spec.padded else step.num_tokens
        live = self._live.get(key)
        if live is None or len(live) < num_rows or live.shape[1:] != rows.shape[1:] or live.dtype is not rows.dtype:
            live = self._live[key] = rows.new_empty((2 * num_rows, *spec.shape), device=self._device)
        live[: len(rows)].copy_(rows)
        if num_rows > len(rows):
            padding_like(live[len(rows) : num_rows])
        return live[:num_rows]

    def _encode(self, key: str, spec: KeySpec, names: NameArray) -> Tensor:
        salt = self._salts.get(key)
        rows = encode(names, key_salt(key) if salt is None else salt, spec.shape, torch_dtype(spec.dtype))
        if spec.filled == "last":
            rows[torch.from_numpy(names == BLANK)] = 0
        return rows

    def _shared(self, key: str, spec: KeySpec) -> Tensor:
        return self._encode(key, spec, np.ones(1, dtype=np.uint64))[0]

    def clobber(self) -> None:
        for tensor in self._returned:
            padding_like(tensor)

    # What is due

    def pristine(self, key: str, step: Step, names_T: NameArray) -> Tensor:
        return self.due_rows(key, _named(self._specs[key], names_T, step))

    def named(self, key: str, names: NameArray, lasts: NDArray[np.bool_]) -> NameArray:
        return names if self._specs[key].filled == "every" else np.where(lasts, names, BLANK)

    def due_rows(self, key: str, names: NameArray) -> Tensor:
        if names is self._made_for and key in self._made:
            return self._made[key]
        return self._encode(key, self._specs[key], names)

    def tolerance(self, key: str) -> tuple[float, float] | None:
        return None

    def value_for(self, key: str, step: Step, row: int) -> Any:
        return self._value_for(key, self._specs[key], step, row)

    def _value_for(self, key: str, spec: KeySpec, step: Step, row: int) -> Any:
        match spec.kind:
            case "row":
                start, stop = step.query_start_loc[row], step.query_start_loc[row + 1]
                return self._made_rows(key, spec)[start:stop]
            case "decode-row":
                start = step.query_start_loc[row]
                return self._made_rows(key, spec)[start : start + 1] if self._decoding(step)[row] else NOTHING
            case "request":
                return self._encode(key, spec, self._request_names(step.req_ids[row : row + 1]))
            case "list" if spec.entries is not None and row >= spec.entries:
                return NOTHING
            case "list":
                return self._encode(key, spec, self._request_names(step.req_ids[row : row + 1]))[0]
            case "shared" | "list-of-one":
                return self._shared(key, spec)
            case "nested":
                fields = {n: self._value_for(f"{key}.{n}", field, step, row) for n, field in spec.fields.items()}
                return {name: value for name, value in fields.items() if value is not NOTHING}
            case "opaque":
                return spec.value

    def _made_rows(self, key: str, spec: KeySpec) -> Tensor:
        """The rows of all tokens of the step last emitted."""
        assert self._made_for is not None, "a value is due only once the step has been emitted"
        if key not in self._made:
            self._made[key] = self._encode(key, spec, self._made_for)
        return self._made[key]

    # What came

    def classify(self, key: str, row: Tensor) -> tuple[RowKind, int | None]:
        kind, name = classify(row, self._salts[key])
        is_blank = kind == "never-written" and self._specs[key].filled == "last" and not row.any()
        return ("row", None) if is_blank else (kind, name)

    def row_nbytes(self, key: str) -> int:
        spec = self._specs[key]
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta").nbytes

    def narrow_keys(self) -> dict[str, int]:
        bits = {
            key: identity_bits(self._specs[key].shape, torch_dtype(self._specs[key].dtype)) for key in self.row_keys
        }
        return {key: carried for key, carried in bits.items() if carried < NARROW}


def _named(spec: KeySpec, names_T: NameArray, step: Step) -> NameArray:
    """What names the step's own rows of a key."""
    return names_T if spec.filled == "every" else np.where(step.lasts_T, names_T, BLANK)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | dict):
            yield from _tensors(value.values() if isinstance(value, dict) else value)
