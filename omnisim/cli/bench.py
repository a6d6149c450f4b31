"""``omnisim bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from omnisim.cli.common import console
from omnisim.errors import UsageError

__all__ = ["bench"]


def bench(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run the benchmarks of this name only.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repetitions: a look, not a measurement.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Stream 1,000,000 steps in place of 100,000: takes a quarter of an hour.")
    ] = False,
) -> None:
    """Measure the cache, the judge and the reader, each as a ratio to something measured in the same process.

    Examples:

    - `omnisim bench`
    - `omnisim bench --only merge --quick`
    - `omnisim bench --only stream --full`
    """
    if quick and full:
        raise UsageError("--quick and --full are two lengths", "choose one of them")
    from omnisim.bench import run_benchmarks

    run_benchmarks(console(), only or [], "quick" if quick else "full" if full else "normal")
