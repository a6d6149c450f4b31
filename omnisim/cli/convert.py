"""``omnisim convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from omnisim.cli.common import console

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Trace to read.", show_default=False)],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Trace to write; its suffix says how: .yaml, .jsonl, .jsonl.zst.", show_default=False
        ),
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
    from rich.text import Text

    from omnisim.report.show import count_steps, summary
    from omnisim.report.words import literal
    from omnisim.trace import convert as convert_trace
    from omnisim.trace import load

    counts = count_steps(load(source))  # nothing is written of a trace that is not legal
    convert_trace(source, target, content=content, overwrite=overwrite)
    facts = summary(load(target), counts)
    console().print(Text.assemble(("wrote", "green"), f"  {literal(str(target))}  ", (facts, "dim")), soft_wrap=True)
    header = load(target).header
    if content is not None:
        console().print(
            "  request ids, provenance and names of files are kept as they were", style="dim", soft_wrap=True
        )
    if header.recorded_rows is not None and source.resolve().parent != target.resolve().parent:
        files = f"{header.recorded_rows.tensors} and the no-cache run"
        told = f"  its recorded rows ({literal(files)}) are not copied, and are looked for beside it"
        console().print(told, style="dim", soft_wrap=True, markup=False)
