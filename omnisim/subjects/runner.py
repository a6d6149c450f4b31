"""What the runners of all vllm-omni releases do around their cache, and an adapter must do in their place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from omnisim.rows.emit import HIDDEN_STATES, ModelOutput
from omnisim.subjects.base import Merged
from omnisim.talker import KeySpec
from omnisim.trace.model import NewRequest, Step

__all__ = ["KnownRequests", "copy_output", "merge", "num_scheduled_of", "starts_of", "unwrap"]


class KnownRequests:
    """A runner's ``self.requests``: who has been scheduled and has not finished."""

    def __init__(self) -> None:
        self._req_ids: set[str] = set()

    def drop(self, req_ids: Collection[str]) -> None:
        """They have finished."""
        self._req_ids.difference_update(req_ids)

    def enter(self, new_requests: Collection[NewRequest]) -> list[str]:
        """Take in new requests; those that were not known. One that was is a streaming prompt, and is not marked."""
        unknown = [new.req_id for new in new_requests if new.req_id not in self._req_ids]
        self._req_ids.update(unknown)
        return unknown


def num_scheduled_of(step: Step) -> dict[str, int]:
    """``scheduler_output.num_scheduled_tokens``."""
    return dict(zip(step.req_ids, step.num_scheduled_tokens, strict=True))


def starts_of(step: Step) -> Tensor:
    """``self.query_start_loc.cpu``, int32 ``[requests + 1]``."""
    return torch.tensor(step.query_start_loc, dtype=torch.int32)


def copy_output(output: ModelOutput) -> ModelOutput:
    """The model's output in memory of its own.

    A release copies from a GPU with ``.cpu()``. That is no copy of a tensor on the CPU, where it would keep views of
    buffers that the next forward overwrites; a step that says ``clobber`` wants exactly that, any other does not.
    """
    return ModelOutput(output.hidden_states.clone(), _copied(output.multimodal_outputs))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def unwrap(value: Any, row: int) -> Any:
    """The element of request ``row`` of a list, element 0 if the list is shorter; dicts are walked."""
    if isinstance(value, list):
        return value[row] if row < len(value) else value[0]
    if isinstance(value, dict):
        return {name: unwrap(item, row) for name, item in value.items()}
    return value


def merge(
    hidden: Mapping[str, Tensor] | None, payloads: Mapping[str, Mapping[str, Any]], declared: Mapping[str, KeySpec]
) -> Merged:
    """What a runner hands on (a flat payload a request) by key, with nested keys as their talker declares them."""
    merged: Merged = {} if hidden is None else {HIDDEN_STATES: dict(hidden)}
    for req_id, payload in payloads.items():
        for path, value in _paths(payload, declared):
            by_request = merged.setdefault(path[0], {})
            if len(path) == 1:
                by_request[req_id] = value
            else:
                by_request.setdefault(req_id, {})[path[1]] = value
    return merged


def _paths(payload: Mapping[str, Any], declared: Mapping[str, KeySpec]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in payload.items():
        key, dot, field = name.partition(".")
        is_field = dot and name not in declared and key in declared and declared[key].kind == "nested"
        yield ((key, field) if is_field else (name,)), value
