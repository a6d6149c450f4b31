"""The batch of a step as a cache reads it: a light stand-in, or vLLM's own ``InputBatch``."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from omnisim.batch.light import LightBatch
from omnisim.trace.model import Geometry, Step

__all__ = ["Batch", "BatchName", "LightBatch", "make_batch"]

BatchName = Literal["light", "vllm"]


class Batch(Protocol):
    """A runner's persistent batch, led from step to step."""

    @property
    def input_batch(self) -> Any:
        """What a cache is handed; it has these attributes of vLLM's ``InputBatch``.

        ``req_ids``, ``req_id_to_index``; ``num_computed_tokens_cpu`` (before the step) and ``num_prompt_tokens`` (-1
        where the trace does not say), int32 ``[>= requests]``; ``block_table.block_tables``, one a KV-cache group, of
        which ``full_attention_group`` has the rows that the trace tells; ``block_table[0].block_table.cpu``, int32
        ``[>= requests, >= blocks]``, zeros where a row has no block; ``block_table[0].block_size``.
        """

    def apply(self, step: Step) -> None:
        """Become what the runner has during the forward of ``step``; requests it does not schedule leave."""


def make_batch(name: BatchName, geometry: Geometry) -> Batch:
    """An empty batch; SetupError where ``vllm`` is asked for and cannot be imported."""
    if name == "light":
        return LightBatch(geometry)
    from omnisim.batch.vllm_batch import VllmBatch

    return VllmBatch(geometry)
