"""Subjects that go wrong outside of their cache: each hands out, keeps or changes what it must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omnisim.subjects.builtin import Builtin

from .stories import HIDDEN, ROWS, VALUES


@dataclass(frozen=True)
class Liar:
    """A subject with one fault, the check that it fails, and the talker that shows it."""

    name: str
    subject: type[Builtin]
    check: str
    talker: Any


LIARS: list[Liar] = []


def liar(check: str, talker: Any = HIDDEN) -> Callable[[type[Builtin]], type[Builtin]]:
    def enter(subject: type[Builtin]) -> type[Builtin]:
        LIARS.append(Liar(subject.__name__, subject, check, talker))
        return subject

    return enter


def each(merged: Any, change: Callable[[Any], Any]) -> Any:
    """Every value that was handed out, changed."""
    return {key: {req_id: change(value) for req_id, value in values.items()} for key, values in merged.items()}


# What is handed out


@liar("keys")
class NothingOnHits(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        return None if self.cache.has_prefix_cached_new_req_ids() else merged


@liar("keys")
class NotADict(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return list(super().deliver(step, batch, output))


@liar("keys")
class AListForAKey(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return {key: list(values.values()) for key, values in super().deliver(step, batch, output).items()}


@liar("keys")
class AGhost(Builtin):
    """A request that is not in the batch gets somebody's rows."""

    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        merged["hidden_states"]["ghost"] = merged["hidden_states"][step.req_ids[0]]
        return merged


@liar("keys")
class AnotherKey(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return super().deliver(step, batch, output) | {"more": {step.req_ids[0]: torch.ones(3)}}


@liar("keys")
class AnotherKeyForNobody(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return super().deliver(step, batch, output) | {"more": {"ghost": None}}


@liar("rows")
class Sparse(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return each(super().deliver(step, batch, output), lambda rows: rows.float().to_sparse())


@liar("rows")
class ANumber(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return each(super().deliver(step, batch, output), lambda rows: 7)


@liar("rows")
class ZeroDim(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return each(super().deliver(step, batch, output), lambda rows: torch.tensor(1.0))


@liar("detached")
class Attached(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return each(super().deliver(step, batch, output), lambda rows: rows.requires_grad_())


@liar("row-count")
class NewRowsOfHitsLost(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        for row, req_id in enumerate(step.req_ids):
            if step.num_computed_tokens[row] and len(merged["hidden_states"][req_id]) > step.num_scheduled_tokens[row]:
                merged["hidden_states"][req_id] = merged["hidden_states"][req_id][: step.num_computed_tokens[row]]
        return merged


@liar("rows", ROWS)
class OneRowOnly(Builtin):
    """The same row again and again."""

    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        return each(super().deliver(step, batch, output), lambda rows: rows[:1].expand_as(rows).contiguous())


# What changes afterwards


@liar("aliasing")
class ZeroedTwoStepsLater(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        kept = self.__dict__.setdefault("kept", [])
        kept.append([rows for values in merged.values() for rows in values.values()])
        for rows in kept[-3] if len(kept) > 2 else ():
            rows.zero_()
        return merged


@liar("aliasing")
class TwoScratchBuffers(Builtin):
    """Outputs lie in two buffers that take turns."""

    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        scratch = self.__dict__.setdefault("scratch", [torch.empty(64, 8, dtype=torch.bfloat16) for _ in range(2)])
        at = 0
        for req_id, rows in merged["hidden_states"].items():
            merged["hidden_states"][req_id] = scratch[step.index % 2][at : at + len(rows)].copy_(rows)
            at += len(rows)
        return merged


@liar("aliasing", VALUES)
class ViewsInsideADict(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        for row, req_id in enumerate(step.req_ids):
            merged["meta"][req_id]["len"] = output.multimodal_outputs["meta"]["len"][row : row + 1]
        return merged


@liar("aliasing")
class ViewsAsParameters(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        for row, req_id in enumerate(step.req_ids):
            start, stop = step.query_start_loc[row], step.query_start_loc[row + 1]
            if len(merged["hidden_states"][req_id]) == stop - start:
                view = output.hidden_states[start:stop]
                merged["hidden_states"][req_id] = torch.nn.Parameter(view, requires_grad=False)
        return merged


# What it must leave alone


@liar("inputs-unchanged", VALUES)
class AValueZeroed(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        output.multimodal_outputs["meta"]["len"].zero_()
        return merged


@liar("inputs-unchanged", VALUES)
class AListEntryZeroed(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        output.multimodal_outputs["codes.ref"][0].zero_()
        return merged


@liar("inputs-unchanged", ROWS)
class AKeyPopped(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        output.multimodal_outputs.pop("K", None)
        return merged


@liar("inputs-unchanged", ROWS)
class AKeyAdded(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        output.multimodal_outputs["mine"] = 1
        return merged


@liar("inputs-unchanged", ROWS)
class PaddingWritten(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        output.hidden_states[step.num_tokens :].zero_()
        return merged


@liar("inputs-unchanged")
class BlockTableZeroed(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        batch.input_batch.block_table[0].block_table.cpu[0] = 0
        return merged


@liar("inputs-unchanged")
class CountsAdvanced(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        batch.input_batch.num_computed_tokens_cpu[0] += 1
        return merged


@liar("inputs-unchanged")
class SlotsWritten(Builtin):
    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        step.slot_mapping[0] += 1
        return merged


# What it must not keep


@liar("deferred-bound")
class HoldsTheDead(Builtin):
    @property
    def holding(self) -> Any:
        return {"somebody"}
