"""``builtin``: our own cache. It is given the model's live buffers, which it must copy from in time."""

from __future__ import annotations

from typing import Any

from omnisim.batch import Batch
from omnisim.cache import OmniTensorPrefixCache, PrefixCacheError
from omnisim.cache.errors import UnsupportedLayout
from omnisim.rows.emit import ModelOutput
from omnisim.subjects.base import Merged, Setup
from omnisim.subjects.contract import ByContract
from omnisim.trace.model import Step

__all__ = ["Builtin"]


class Builtin(ByContract):
    """``omnisim.cache.OmniTensorPrefixCache``, or a class derived from it."""

    refusals: tuple[type[Exception], ...] = (PrefixCacheError,)

    def __init__(self, cache_class: type[OmniTensorPrefixCache] = OmniTensorPrefixCache, name: str = "") -> None:
        super().__init__(cache_class, name or _name_of(cache_class))

    def open(self, setup: Setup) -> None:
        geometry = setup.geometry
        if geometry.kernel_block_size not in (None, geometry.block_size):
            raise UnsupportedLayout(
                expected=f"kernel blocks of the allocator's size, {geometry.block_size}",
                found=f"kernel_block_size {geometry.kernel_block_size}",
            )
        if geometry.full_attention_group:
            raise UnsupportedLayout(
                expected="the full-attention group first, for its blocks are read",
                found=f"full_attention_group {geometry.full_attention_group}",
            )
        super().open(setup)

    def _extra_arguments(self, known: dict[str, Any]) -> dict[str, Any]:
        return known

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged:
        return self._deliver(step, batch, output)

    @property
    def holding(self) -> frozenset[str]:
        held: frozenset[str] = self.cache.deferred_req_ids
        return held

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        counters = self.cache.counters
        return {"written": dict(counters.rows_written), "served": dict(counters.rows_served)}


def _name_of(cache_class: type[OmniTensorPrefixCache]) -> str:
    return "builtin" if cache_class is OmniTensorPrefixCache else cache_class.__name__
