"""``omnisim bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from omnisim.cli.common import console

__all__ = ["bench"]


def bench(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run the benchmarks of this name only.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repetitions: a look, not a measurement.")] = False,
) -> None:
    """Measure the cache, the judge and the reader, each as a ratio to something measured in the same process.

    Examples:

    - `omnisim bench`
    - `omnisim bench --only merge --quick`
    """
    from omnisim.bench import run_benchmarks

    run_benchmarks(console(), only or [], quick)
