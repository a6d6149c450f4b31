"""``omnisim bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnisim.cli.common import console
from omnisim.cli.options import TalkerName
from omnisim.errors import SetupError, UsageError

__all__ = ["bench"]


def bench(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run the benchmarks of this name only.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repetitions: a look, not a measurement.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Stream 1,000,000 steps in place of 100,000: takes a quarter of an hour.")
    ] = False,
    subject: Annotated[
        list[str] | None,
        typer.Option(help="Measure this cache, and each that is named, against the first of them.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Tell what each --subject writes in this trace, against what is ever read again.", show_default=False
        ),
    ] = None,
    talker: TalkerName = None,
) -> None:
    """Measure the cache, the judge and the reader, each as a ratio to something measured in the same process.

    With --subject, measure caches against each other: each in a process of its own, turn by turn.

    Examples:

    - `omnisim bench`
    - `omnisim bench --only merge --quick`
    - `omnisim bench --only stream --full`
    - `omnisim bench --subject vllm-omni:0.28.0 --subject builtin`
    - `omnisim bench --subject vllm-omni:0.30.0 --trace traces/recorded/chat-roomy.jsonl.zst --quick`
    """
    if quick and full:
        raise UsageError("--quick and --full are two lengths", "choose one of them")
    if subject:
        if only or full:
            raise UsageError(f"--subject does not go with {'--only' if only else '--full'}", "leave one of them out")
        _against_each_other(list(dict.fromkeys(subject)), quick, trace, talker)
        return
    if trace is not None or talker is not None:
        raise UsageError(f"{'--talker' if trace is None else '--trace'} asks about a --subject", "name one")
    from omnisim.bench import run_benchmarks

    run_benchmarks(console(), only or [], "quick" if quick else "full" if full else "normal")


def _against_each_other(subjects: list[str], quick: bool, trace: Path | None, talker: str | None) -> None:
    from omnisim.report.versus import print_copied, print_timings
    from omnisim.subjects import check_subject
    from omnisim.talkers import load_talker
    from omnisim.trace import load
    from omnisim.versus import WIDTHS, Copied, copied, measure

    if talker is not None and trace is None:
        raise UsageError("--talker says what is emitted in a --trace", "name one")
    for subject in subjects:
        if subject == "none":
            raise UsageError("none has no cache that could be measured", "choose another subject")
        check_subject(subject)
    if talker is not None:
        load_talker(talker)
    if trace is not None:
        load(trace)
    out = console()
    print_timings(out, {width: measure(subjects, width, 5 if quick else 31) for width in WIDTHS})
    if trace is None:
        return
    told: dict[str, Copied | str] = {}
    for subject in subjects:
        try:
            told[subject] = copied(subject, trace, talker)
        except SetupError as error:
            told[subject] = str(error)
    print_copied(out, trace, told)
