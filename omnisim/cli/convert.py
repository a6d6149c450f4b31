"""``omnisim convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(help="Trace to read.", show_default=False)],
    target: Annotated[
        Path, typer.Argument(help="Trace to write; its suffix says how: .yaml, .jsonl, .jsonl.zst.", show_default=False)
    ],
    content: Annotated[
        Literal["hashed", "none"] | None,
        typer.Option(
            help="Take the token ids out: hashed keeps equal prefixes equal (with a key that is thrown away), "
            "none keeps no content at all.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")] = False,
) -> None:
    """Convert a trace from one encoding to another, without loss unless asked.

    Examples:

    - `omnisim convert trace.yaml trace.jsonl.zst`
    - `omnisim convert capture.jsonl.zst public.jsonl.zst --content hashed`
    """
    from omnisim.trace import convert as convert_trace

    convert_trace(source, target, content=content, overwrite=overwrite)
