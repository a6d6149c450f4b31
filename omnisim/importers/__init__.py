"""Foreign files that become traces or workloads, one format a module."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from omnisim.errors import UsageError
from omnisim.importers.options import ReadOptions

if TYPE_CHECKING:
    from omnisim.workload import Workload

__all__ = ["WORKLOAD_FORMATS", "ReadOptions", "read_workload"]


def _reader(module: str) -> Callable[[Path, ReadOptions], Workload]:
    """``read`` of a module of this room, which is imported when a file is read."""

    def read(path: Path, options: ReadOptions) -> Workload:
        workload: Workload = import_module(f"omnisim.importers.{module}").read(path, options)
        return workload

    return read


WORKLOAD_FORMATS = {
    "mooncake": _reader("mooncake"),
    "qwen-bailian": _reader("qwen_bailian"),
    "azure": _reader("azure"),
    "burstgpt": _reader("burstgpt"),
    "sharegpt": _reader("sharegpt"),
    "vllm-custom": _reader("vllm_custom"),
    "blocks": _reader("blocks"),
}
"""Readers by the name of their format. FileError for a file that cannot be read as one."""

_TEXT = ("sharegpt", "vllm-custom")


def read_workload(text: str, options: ReadOptions) -> Workload:
    """The workload of ``FORMAT:FILE``; UsageError for a format that is not known, FileError for the file."""
    name, colon, file = text.partition(":")
    if not colon or not file or name not in WORKLOAD_FORMATS:
        raise UsageError(f"{text!r} names no {'format' if colon and file else 'format and file'}", _remedy(name))
    if options.tokenizer is not None and name not in _TEXT:
        raise UsageError(f"{name} holds no text for a tokenizer", f"leave it out; of text are {', '.join(_TEXT)}")
    return WORKLOAD_FORMATS[name](Path(file), options)


def _remedy(name: str) -> str:
    close = get_close_matches(name, WORKLOAD_FORMATS, n=1)
    hint = f"did you mean {close[0]!r}? " if close and close[0] != name else ""
    return f"{hint}write FORMAT:FILE with one of {', '.join(WORKLOAD_FORMATS)}"
