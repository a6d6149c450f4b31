"""Rows on their way into a cache, seen where torch writes them: whatever the cache, it must scatter them by slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InjectedFailure", "WriteMeter", "failing_write"]

_SCATTERS = {
    torch.ops.aten.index_copy_.default: 3,
    torch.ops.aten.index_put_.default: 2,
    torch.ops.aten._index_put_impl_.default: 2,
    torch.ops.aten.scatter_.src: 3,
}
"""Operators that write rows where an index says, and which of their arguments the rows are."""


class InjectedFailure(RuntimeError):
    """The failure of a write that a trace asks for."""


class WriteMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is scattered into a storage of ``num_slots`` while it is entered, in ``rows`` and ``num_bytes``.

    A storage has rows, two dimensions or more; what has one is a cache's own bookkeeping, for one-dimensional values
    are never cached.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_slots = num_slots
        self.rows = 0
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (source := _SCATTERS.get(func)) is not None and args[0].ndim > 1 and len(args[0]) >= self._num_slots:
            self.write(args[source])
        return func(*args, **(kwargs or {}))

    def write(self, rows: torch.Tensor) -> None:
        """Rows that are about to be written."""
        self.rows += len(rows)
        self.num_bytes += rows.nbytes


class _FirstFails(WriteMeter):  # type: ignore[no-untyped-call]
    def __init__(self, step: int, num_slots: int) -> None:
        super().__init__(num_slots)
        self._step = step

    def write(self, rows: torch.Tensor) -> None:
        first = not self.rows
        super().write(rows)
        if first:
            raise InjectedFailure(f"the trace lets the first write of step {self._step} fail")


@contextmanager
def failing_write(step: int, num_slots: int) -> Iterator[None]:
    """Let the first write of rows in here fail, with InjectedFailure."""
    with _FirstFails(step, num_slots):
        yield
