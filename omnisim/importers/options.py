"""What can be asked of a reader of workloads, whatever the format."""

from __future__ import annotations

from dataclasses import dataclass

from omnisim.errors import UsageError

__all__ = ["ReadOptions"]

_MOST = 1000.0


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a workload; UsageError for what cannot be done.

    ``limit``: stop after so many rows were kept. ``scale_lengths`` and ``time_scale`` multiply lengths and times.
    ``tokenizer``: a tokenizer.json, or the folder of one, for formats that hold text.
    """

    limit: int | None = None
    scale_lengths: float = 1.0
    time_scale: float = 1.0
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"a limit of {self.limit} rows leaves nothing", "give at least 1")
        _check_factor("--scale-lengths", self.scale_lengths)
        _check_factor("--time-scale", self.time_scale)

    def scaled(self, length: int) -> int:
        """A length that is not made of blocks, at least 1."""
        return max(1, round(length * self.scale_lengths))


def _check_factor(name: str, value: float) -> None:
    if not 0 < value <= _MOST:
        raise UsageError(f"{name} is {value}", f"give a number above 0 and up to {_MOST:g}")
