"""vllm-omni 0.24, 0.26, 0.28: one file (byte for byte the same), which writes on a CUDA stream of its own.

Its runner calls as that of 0.22 does (``omnisim.subjects.release_022``), but

    execute_model      drain_ready_async_writes            first of all: writes whose copy has arrived
                       schedule_async_write                in place of the update: waits for the last step's copy,
                                                           writes it, starts this step's
    sample_tokens      get_merged_hidden_states            with hidden states that nobody staged

so that a row is in the cache one step after the one that computed it. There are three ways to see this on a CPU:

    pending    as on CUDA: the release's own ``schedule_async_write`` runs, with streams and events that do nothing; a
               step's write is applied by the next step's call
    sync       ``update_omni_tensor_prefix_cache`` in its place, as the NPU runner of these releases has it
    off        what a host without CUDA does: ``schedule_async_write`` returns at once, and nothing is ever written
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from omnisim.batch import Batch
from omnisim.subjects.base import Setup, WriteMode
from omnisim.subjects.release_022 import Release022
from omnisim.subjects.wheel import Wheel
from omnisim.trace.model import Step

__all__ = ["Release024"]


class Release024(Release022):
    """The one-file cache with writes that arrive one step late."""

    def __init__(self, wheel: Wheel) -> None:
        super().__init__(wheel)
        self._payload_build = None
        if wheel.has_module("worker.output.payload_build"):  # since 0.28
            self._payload_build = wheel.module("worker.output.payload_build")

    def open(self, setup: Setup) -> None:
        self._mode = setup.write_mode
        as_it_is = setup.device == "cuda" and self._mode == "pending"
        self._cache_module.torch = torch if as_it_is else _SEEN[self._mode]()
        super().open(setup)

    def finish(self, step: Step, batch: Batch) -> None:
        self.cache.drain_ready_async_writes()
        super().finish(step, batch)

    def _write(self, step: Step, hidden: Tensor, flat: Mapping[str, Any] | None) -> Tensor | None:
        if self._mode == "sync":
            self._update(step, hidden, flat, None)
            return None
        self.cache.schedule_async_write(
            hidden_states_gpu=hidden.clone() if self._needs_hidden else None,
            multimodal_outputs_gpu=_cloned(flat) if flat else None,
            slot_mapping_gpu=torch.from_numpy(step.slot_mapping),
            num_tokens_unpadded=step.num_tokens,
            num_tokens_padded=step.num_tokens_padded,
            skip_mm_cache_keys=self._deferred,
        )
        return None

    def _combined(self, combined: Mapping[str, Mapping[str, Any]], req_id: str, row: int) -> dict[str, Any]:
        if self._payload_build is None:
            return super()._combined(combined, req_id, row)
        payload = self._payload_build.build_combined_prefix_cache_mm_payload(combined, rid=req_id, list_idx=row)
        flat: dict[str, Any] = self._flatten(payload)
        return flat

    def _lengths(self, step: Step, hidden: Tensor) -> dict[str, int]:
        return {"seq_len": len(hidden), "scheduled_seq_len": step.num_tokens}


def _cloned(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A copy to the CPU that has been started is not changed by what comes after it on the stream."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in flat.items()}


class _Torch:
    """torch as the cache module sees it: all of it but ``cuda``, and no pinned memory."""

    cuda: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, **kwargs)


class _NoCuda(_Torch):
    """A host without CUDA, whatever this one has."""

    class cuda:  # noqa: N801
        @staticmethod
        def is_available() -> bool:
            return False


class _Event:
    """Of a copy that has not arrived when it is asked for, and has when it is waited for."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


class _OneStepLate(_Torch):
    """CUDA, as far as the cache asks for it, with nothing behind it."""

    class cuda:  # noqa: N801
        Stream, Event = _Stream, _Event

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def current_stream() -> _Stream:
            return _Stream()

        @staticmethod
        def stream(stream: _Stream) -> Any:
            return nullcontext()


_SEEN: dict[WriteMode, type[_Torch]] = {"pending": _OneStepLate, "sync": _NoCuda, "off": _NoCuda}
