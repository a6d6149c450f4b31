"""``omnisim bisect``."""

from __future__ import annotations

from dataclasses import replace as with_changes
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnisim.cli.common import console, parse_steps
from omnisim.cli.options import BatchName, ReadDelay, Seconds, Steps, TalkerName, Truth, WriteMode
from omnisim.errors import UsageError

if TYPE_CHECKING:
    from omnisim.verify import Run

__all__ = ["bisect"]


def bisect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A trace.", show_default=False)],
    good: Annotated[str, typer.Option(help="Where it is as it should be: a release (0.30.0), or one of --over.")],
    bad: Annotated[str, typer.Option(help="Where it is not; older or newer than the good one.")],
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="In place of the known releases, subjects from the oldest to the newest; give several.",
            show_default=False,
        ),
    ] = None,
    talker: TalkerName = None,
    truth: Truth = None,
    batch: BatchName = "light",
    steps: Steps = None,
    write_mode: WriteMode = "pending",
    read_delay: ReadDelay = 0,
    timeout: Seconds = 60.0,
) -> None:
    """Find the first release under which the outcome of a trace changed.

    Examples:

    - `omnisim bisect trace.yaml --good 0.30.0 --bad 0.22.0`
    - `omnisim bisect trace.yaml --good path:old --bad path:new --over path:old --over path:between --over path:new`
    """
    from omnisim.bisect import bisect as find
    from omnisim.bisect import said
    from omnisim.matrix import run_all
    from omnisim.subjects import check_subject
    from omnisim.verify import Options, check_options

    subjects = _between(good, bad, over or [])
    options = Options(
        talker=talker,
        truth=truth,
        batch=batch,
        steps=parse_steps(steps),
        write_mode=write_mode,
        read_delay=read_delay,
    )
    check_options(options)
    for subject in subjects:
        check_subject(subject)
    out = console()

    def run(subject: str) -> Run:
        found = run_all({subject: [path]}, with_changes(options, subject=subject), timeout)[path, subject]
        out.print(f"  {subject}: {said(found)}", markup=False)
        return found

    change = find(subjects, run)
    out.print(f"{change.after.subject} is the first that is not as {change.before.subject}:", markup=False)
    for one in (change.before, change.after):
        out.print(f"  {one}", markup=False, soft_wrap=True)


def _between(good: str, bad: str, over: list[str]) -> list[str]:
    """The subjects from the one end to the other, the oldest first."""
    from omnisim.subjects.store import RELEASES

    order = over or [f"vllm-omni:{version}" for version in RELEASES]
    ends = [end if over or end.startswith("vllm-omni:") else f"vllm-omni:{end}" for end in (good, bad)]
    for end in ends:
        if end not in order:
            raise UsageError(f"{end} is not in the order {', '.join(order)}", "choose from these, or give --over")
    if len(set(order)) < len(order) or ends[0] == ends[1]:
        raise UsageError("the same subject is there twice", "give each once, and two ends that differ")
    low, high = sorted(order.index(end) for end in ends)
    return order[low : high + 1]
