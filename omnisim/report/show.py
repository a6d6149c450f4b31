"""What happened in a trace, as tables and a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnisim.report.words import literal, num, print_table
from omnisim.trace import Trace
from omnisim.trace.model import Geometry, Header, Step

__all__ = ["Counts", "count_steps", "print_overview", "print_request", "print_step", "summary"]

_MAX_WIDTH = 160
"""Of a timeline: in a pipe the console is as wide as it takes."""

# The more telling comes first: where several steps share a column, it is the one shown.
_SIGNS = {
    "H": ("hit: enters with computed tokens", "bold green"),
    "R": ("resumed", "bold yellow"),
    "x": ("preempted", "bold red"),
    "P": ("prefill", "cyan"),
    "d": ("decode", "white"),
    ".": ("alive, not scheduled", "dim"),
    " ": ("", ""),
}
_ORDER = "".join(_SIGNS)


def _sign_of(step: Step, row: int) -> str:
    """What one request does in a step."""
    req_id, num_computed = step.req_ids[row], step.num_computed_tokens[row]
    if req_id in step.resumed_req_ids:
        return "R"
    if num_computed and any(new.req_id == req_id for new in step.scheduled_new_reqs):
        return "H"
    num_prompt_tokens = step.num_prompt_tokens[row]
    decodes = step.num_scheduled_tokens[row] == 1 if num_prompt_tokens < 0 else num_computed >= num_prompt_tokens
    return "d" if decodes else "P"


@dataclass(slots=True)
class _Line:
    """Signs of one request over the columns of the timeline."""

    first: int
    signs: dict[int, str] = field(default_factory=dict)
    last: int | None = None

    def put(self, column: int, sign: str) -> None:
        if _ORDER.index(sign) < _ORDER.index(self.signs.get(column, " ")):
            self.signs[column] = sign


def print_overview(console: Console, trace: Trace, most_requests: int = 64) -> None:
    """Header, counts and the timeline of requests over steps."""
    counts = count_steps(trace)
    label_width = min(counts.longest_id, 24) if console.is_terminal else counts.longest_id
    width = min(max(console.width - label_width - 4, 20), _MAX_WIDTH)
    steps_a_column = max(1, -(-(counts.last + 1) // width))
    lines = _timeline(trace.steps(), steps_a_column)
    _print_header(console, trace, counts)
    if not counts.steps:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, max_width=label_width, style="dim")
    table.add_column(no_wrap=True)
    last_column = counts.last // steps_a_column
    table.add_row("", Text(_ruler(last_column + 1, steps_a_column), style="dim"))
    for req_id, line in list(lines.items())[:most_requests]:
        table.add_row(Text(literal(req_id)), _drawn(line, last_column))
    print_table(console, table)
    if len(lines) > most_requests:
        console.print(Text(f"  and {num(len(lines) - most_requests, 'more request')}", style="dim"))
    legend = "   ".join(f"{sign} {meaning}" for sign, (meaning, _) in _SIGNS.items() if meaning)
    scale = "a column is one step" if steps_a_column == 1 else f"a column is {steps_a_column:,} steps"
    console.print(Text(f"\n  {legend}\n  {scale}", style="dim"))


def _print_header(console: Console, trace: Trace, counts: Counts) -> None:
    console.print(Text.assemble((literal(trace.path), "bold"), f"  {summary(trace, counts)}"), soft_wrap=True)
    if trace.header.provenance:
        console.print(Text(literal(" ".join(trace.header.provenance.split())), style="dim"))
    console.print()


@dataclass(slots=True)
class Counts:
    """What a trace has; ``last`` is the index of its last step (-1 where there is none)."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    last: int = -1
    longest_id: int = 0


def count_steps(trace: Trace) -> Counts:
    """Read the whole trace, and so check that it is legal; FileError where it is not."""
    counts = Counts()
    for step in trace.steps():
        counts.last = step.index
        counts.steps += 1
        counts.requests += len(step.scheduled_new_reqs)
        counts.tokens += step.num_tokens
        for new in step.scheduled_new_reqs:
            counts.longest_id = max(counts.longest_id, cell_len(literal(new.req_id)))
    return counts


def summary(trace: Trace, counts: Counts) -> str:
    """One line about a trace: what it has, over which cache, by whom."""
    header: Header = trace.header
    facts = (
        f"{num(counts.steps, 'step')}, {num(counts.requests, 'request')}, {num(counts.tokens, 'token')}",
        f"{num(header.cache.num_blocks, 'block')} of {header.cache.block_size}",
        f"content {header.content}",
        f"by {header.producer.name} {header.producer.version}".rstrip(),
    )
    return literal("; ".join(facts))


def _timeline(steps: Iterable[Step], steps_a_column: int) -> dict[str, _Line]:
    lines: dict[str, _Line] = {}
    for step in steps:
        column = step.index // steps_a_column
        for req_id in lines.keys() & set(step.finished_req_ids):
            lines[req_id].last = max((step.index - 1) // steps_a_column, lines[req_id].first)
        for req_id in step.preempted_req_ids:
            lines[req_id].put(column, "x")
        for row, req_id in enumerate(step.req_ids):
            lines.setdefault(req_id, _Line(column)).put(column, _sign_of(step, row))
    return lines


def _drawn(line: _Line, last_column: int) -> Text:
    text = Text(" " * line.first)
    end = last_column if line.last is None else line.last
    for column in range(line.first, max(end, max(line.signs)) + 1):
        sign = line.signs.get(column, ".")
        text.append(sign, style=_SIGNS[sign][1])
    return text


def _ruler(num_columns: int, steps_a_column: int) -> str:
    stride = 10 * (1 + len(str(num_columns * steps_a_column)) // 10)
    marks = [str(column * steps_a_column).ljust(stride) for column in range(0, num_columns, stride)]
    return "".join(marks)


def print_step(console: Console, step: Step) -> None:
    """The batch of one step, a row a request."""
    padded = f" (padded to {step.num_tokens_padded:,})" if step.num_tokens_padded != step.num_tokens else ""
    counts = f"{num(len(step.req_ids), 'request')}, {num(step.num_tokens, 'token')}{padded}"
    console.print(Text.assemble((f"step {step.index}", "bold"), f"  {counts}"))
    for name in ("finished_req_ids", "preempted_req_ids", "resumed_req_ids", "absent_keys"):
        if values := getattr(step, name):
            console.print(Text(f"  {name}: {', '.join(map(literal, values))}"), soft_wrap=True)
    if not step.req_ids:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("request", "", "num_computed_tokens", "num_scheduled_tokens", "slots", "blocks"):
        table.add_column(column, justify="right" if column.startswith("num_") else "left", overflow="fold")
    for row, req_id in enumerate(step.req_ids):
        start, stop = step.query_start_loc[row], step.query_start_loc[row + 1]
        table.add_row(
            Text(literal(req_id)),
            _sign(step, row),
            str(step.num_computed_tokens[row]),
            str(step.num_scheduled_tokens[row]),
            _runs(step.slot_mapping[start:stop]),
            _runs(np.asarray(step.block_table[row])),
        )
    print_table(console, table)


def print_request(console: Console, trace: Trace, req_id: str) -> bool:
    """The life of one request, a row a step; False if the trace does not know it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("step", "", "positions", "slots", "blocks", "cached positions, and who computed them"):
        table.add_column(column, justify="right" if column == "step" else "left", overflow="fold")
    owners = _Owners(trace.header.cache)
    for step in trace.steps():
        owners.enter(step)
        if req_id in step.req_ids:
            row = step.req_ids.index(req_id)
            start, stop = step.query_start_loc[row], step.query_start_loc[row + 1]
            computed, scheduled = step.num_computed_tokens[row], step.num_scheduled_tokens[row]
            positions = f"[{computed}, {computed + scheduled})"
            slots, blocks = _runs(step.slot_mapping[start:stop]), _runs(np.asarray(step.block_table[row]))
            cached = "; ".join(owners.of_prefix(step, row)) if _sign_of(step, row) in "HR" else ""
            table.add_row(str(step.index), _sign(step, row), positions, slots, blocks, literal(cached))
        elif req_id in step.preempted_req_ids:
            table.add_row(str(step.index), Text("preempted", style=_SIGNS["x"][1]), "", "", "")
        if req_id in step.finished_req_ids and table.row_count:
            table.add_row(str(step.index), Text("finished or aborted before this step", style="dim"), "", "", "")
    if table.row_count:
        console.print(Text.assemble((literal(req_id), "bold"), f" in {literal(trace.path)}"), soft_wrap=True)
        print_table(console, table)
    return table.row_count > 0


class _Owners:
    """Who computed each slot last, and in which step."""

    def __init__(self, cache: Geometry) -> None:
        self._block_size = cache.kernel_block_size or cache.block_size
        self._who = np.full(cache.num_blocks * cache.block_size, -1, dtype=np.int32)
        self._when = np.full(cache.num_blocks * cache.block_size, -1, dtype=np.int32)
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}

    def enter(self, step: Step) -> None:
        for req_id in step.finished_req_ids:
            self._numbers.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            self._numbers[new.req_id] = len(self._names)
            self._names.append(new.req_id)
        numbers = np.repeat([self._numbers[req_id] for req_id in step.req_ids], step.num_scheduled_tokens)
        stored = step.slot_mapping >= 0
        self._who[step.slot_mapping[stored]] = numbers[stored]
        self._when[step.slot_mapping[stored]] = step.index

    def of_prefix(self, step: Step, row: int) -> Iterator[str]:
        """Whose rows the computed positions of a request are, run by run."""
        if not step.num_computed_tokens[row]:
            return
        positions = np.arange(step.num_computed_tokens[row])
        blocks = np.asarray(step.block_table[row], dtype=np.int64)[positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        who, when = self._who[slots], self._when[slots]
        breaks = np.flatnonzero((np.diff(who) != 0) | (np.diff(when) != 0)) + 1
        for part in np.split(positions, breaks):
            yield f"[{part[0]}, {part[-1] + 1}) {self._words(int(who[part[0]]), int(when[part[0]]))}"

    def _words(self, number: int, index: int) -> str:
        if number < 0:
            return "nobody in this trace"
        name = self._names[number]
        return f"{name} in step {index}, {'running' if self._numbers.get(name) == number else 'over'}"


def _sign(step: Step, row: int) -> Text:
    meaning, style = _SIGNS[_sign_of(step, row)]
    return Text(meaning.partition(":")[0], style=style)


def _runs(numbers: Sequence[int] | np.ndarray) -> str:
    """``4-7 12 20-23``: numbers that follow each other as runs."""
    values = np.asarray(numbers)
    if not len(values):
        return "-"
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return " ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in np.split(values, breaks))
