"""A trace, a subject and the options in, one run's result out: makes the parts, drives them, adds up."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from omnisim.batch import make_batch
from omnisim.errors import CannotJudge, FileError, SetupError, UsageError
from omnisim.explain import Evidence, explain, gather
from omnisim.replay import replay
from omnisim.rows import make_names, make_rows
from omnisim.rows.source import RowSource
from omnisim.subjects import WRITE_MODES, Setup, Subject, WriteMode, check_subject, make_subject
from omnisim.talker import Talker
from omnisim.talkers import check_talker, load_talker
from omnisim.trace import Trace
from omnisim.trace.model import Geometry, Step
from omnisim.truth import MAX_ROW_KEYS, Grade, HitKind, Truth
from omnisim.verdict import Divergence, Judge, Tally
from omnisim.writes import InjectedFailure

__all__ = [
    "FirstDivergence",
    "Options",
    "Run",
    "RunOutcome",
    "check_options",
    "choose_grade",
    "choose_talker",
    "died",
    "unusable",
    "verify",
]

RunOutcome = Literal["agreement", "divergence", "refusal", "crash", "unusable"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a trace is replayed. ``steps`` are judged from ``[0]`` up to ``[1]``; the ones before are replayed too."""

    subject: str = "builtin"
    talker: str | None = None
    rows: Literal["owner", "recorded"] = "owner"
    truth: Grade | None = None
    batch: Literal["light", "vllm"] = "light"
    device: str = "cpu"
    steps: tuple[int, int | None] = (0, None)
    fail_fast: bool = False
    max_memory: int | None = None
    write_mode: WriteMode = "pending"
    read_delay: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("rows", ("owner", "recorded")), ("truth", (None, "content", "provenance")),
                              ("batch", ("light", "vllm")), ("device", ("cpu", "cuda")),
                              ("write_mode", WRITE_MODES)):  # fmt: skip
            if (value := getattr(self, name)) not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise UsageError(f"{name} {value!r} is not one of {known}", "choose one of them")


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """The first divergence of a run, with what the trace says about it; ``seen`` is the step that brought it to light.

    That is a later one where an output changed after it was handed out.
    """

    divergence: Divergence
    seen: int
    evidence: Evidence
    explanation: str

    def __str__(self) -> str:
        wrong = self.divergence
        where = [f"step {wrong.step}"]
        where += [f"request {wrong.req_id}"] if wrong.req_id is not None else []
        where += [f"key {wrong.key}"] if wrong.key is not None else []
        said = f"{', '.join(where)}: {wrong.check}: due {wrong.due}, came {wrong.came}"
        return f"{said}. {self.explanation}" if self.explanation else said


@dataclass(slots=True)
class Run:
    """The result of one trace under one subject. ``notes`` are sentences a reader must know to trust the numbers."""

    trace: str
    subject: str
    talker: str
    truth: Grade
    options: Options
    outcome: RunOutcome = "agreement"
    steps: int = 0
    requests: int = 0
    hits: Counter[HitKind] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    first: FirstDivergence | None = None
    error: str = ""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    subject_seconds: float = 0.0
    total_seconds: float = 0.0

    def __str__(self) -> str:
        """The run in a sentence or two, as for an assertion that fails."""
        keys = self.tally.keys.values()
        checked, wrong = sum(key.outputs_checked for key in keys), sum(key.outputs_wrong for key in keys)
        said = f"{self.outcome}: {self.trace}, subject {self.subject}, talker {self.talker}: "
        said += f"{wrong:,} of {checked:,} outputs wrong"
        if self.first is not None:
            said += f"; the first: {self.first}"
        return f"{said}; {self.error}" if self.error else said


Progress = Callable[[int], None]
"""Called with the index of each step that has been judged."""


def check_options(options: Options) -> None:
    """Raise for what would stop any replay: an unknown name, a wrong talker file, a missing extra or GPU."""
    check_subject(options.subject)
    if options.talker is not None:
        load_talker(options.talker)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SetupError("--device cuda needs a GPU that torch can use, and there is none", "use --device cpu")
    make_batch(options.batch, Geometry(num_blocks=1, block_size=1))


def verify(trace: Trace, options: Options, subject: Subject | None = None, progress: Progress | None = None) -> Run:
    """Replay ``trace`` and judge every output. ``subject`` is one to use in place of ``options.subject``."""
    start = perf_counter()
    talker = choose_talker(trace, options)
    grade = choose_grade(trace, options)
    rows = make_rows(trace, talker, options.rows, options.device)
    name = options.subject if subject is None else subject.name
    subject = subject or make_subject(options.subject)
    _check_keys(trace, rows)
    _check_memory(trace, rows, options)
    truth = Truth(trace.header.cache, rows.row_keys, make_names(grade), grade)
    judge = Judge(rows, truth)
    run = Run(trace.path, name, talker.name, grade, options, tally=judge.tally)
    run.notes += _notes(rows)
    try:
        subject.open(Setup(trace.header.cache, rows.talker, options.device, options.write_mode, options.read_delay))
    except (Exception, SystemExit) as raised:  # the code under test may raise anything, and must not end us
        _enter_raised(run, subject, raised, "when it was opened")
    else:
        with _naming(trace):
            found = _drive(run, trace, truth, rows, subject, judge, progress)
        try:
            run.counts = subject.counts
        except (Exception, SystemExit) as raised:  # this too is code under test
            _enter_raised(run, subject, raised, "when it was asked for its counts")
        if found is not None:
            _enter_divergence(run, trace, grade, *found)
    _close(run, subject)
    if run.outcome == "agreement" and not any(tally.outputs_checked for tally in run.tally.keys.values()):
        raise CannotJudge(f"{trace.path}: nothing was judged: {_emptiness(options)}", "check the trace and --steps")
    run.total_seconds = perf_counter() - start
    return run


def died(trace: Trace, options: Options, how: str, steps: int) -> Run:
    """The run of a subject whose process ended before it did: a crash, and ``how``."""
    name = choose_talker(trace, options).name
    run = Run(trace.path, options.subject, name, choose_grade(trace, options), options, outcome="crash", error=how)
    run.steps = steps
    return run


def unusable(path: str, options: Options, why: str) -> Run:
    """The run of a trace that could not be judged."""
    name = options.talker or ""
    return Run(path, options.subject, name, options.truth or "content", options, outcome="unusable", error=why)


@contextmanager
def _naming(trace: Trace) -> Iterator[None]:
    """What the rows find wrong in the middle of a replay is said of this trace."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has an error of its own for a GPU only
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise SetupError(f"{trace.path}: no memory for the rows of a step", "use a narrower --talker") from None
    except CannotJudge as error:
        what = error.what if trace.path in error.what else f"{trace.path}: {error.what}"
        raise CannotJudge(what, error.remedy) from None


def _emptiness(options: Options) -> str:
    start, stop = options.steps
    some = f" in {start}:{'' if stop is None else stop}" if (start, stop) != (0, None) else ""
    return f"the trace has no step{some} that hands anything out"


def _drive(
    run: Run,
    trace: Trace,
    truth: Truth,
    rows: RowSource,
    subject: Subject,
    judge: Judge,
    progress: Progress | None,
) -> tuple[Divergence, int] | None:
    """The first divergence, and the step that brought it to light."""
    options = run.options
    batch = make_batch(options.batch, trace.header.cache)
    found: list[tuple[Divergence, int]] = []
    last = -1
    for outcome in replay(_up_to(trace, options.steps[1]), truth, rows, subject, batch):
        step = outcome.due.step
        run.subject_seconds += outcome.seconds
        if not outcome.is_late:
            last = step.index
            run.steps += 1
            run.requests += len(step.scheduled_new_reqs)
            run.hits.update(prefix.kind for prefix in outcome.due.prefixes.values())
        if outcome.raised is not None:
            _enter_raised(run, subject, outcome.raised, f"in step {step.index}")
            break
        if step.req_ids and step.index >= options.steps[0]:
            found += [(divergence, last) for divergence in judge.judge(outcome)][: not found]
        if progress is not None:
            progress(step.index)
        if found and options.fail_fast:
            return found[0]
    rows.clobber()
    found += [(divergence, last) for divergence in judge.end()]
    return found[0] if found else None


def _up_to(trace: Trace, stop: int | None) -> Iterator[Step]:
    """Steps before ``stop``; what comes after them is not read, for it may be damaged."""
    if stop is None:
        yield from trace.steps()
        return
    for step in trace.steps():
        if step.index < stop:
            yield step
        if step.index + 1 >= stop:
            return


def _enter_raised(run: Run, subject: Subject, raised: BaseException, when: str) -> None:
    refused = isinstance(raised, (*subject.refusals, InjectedFailure)) and not isinstance(raised, subject.hangs)
    run.outcome = "refusal" if refused else "crash"
    where = traceback.extract_tb(raised.__traceback__)
    at = f" ({where[-1].filename}:{where[-1].lineno})" if where and run.outcome == "crash" else ""
    run.error = f"{type(raised).__name__} {when}: {raised}{at}"


def _close(run: Run, subject: Subject) -> None:
    try:
        subject.close()
    except (Exception, SystemExit) as raised:
        if run.outcome == "agreement":
            _enter_raised(run, subject, raised, "when it was closed")


def _enter_divergence(run: Run, trace: Trace, grade: Grade, divergence: Divergence, seen: int) -> None:
    evidence = gather(trace.steps(), make_names(grade), divergence, trace.header.cache.block_size)
    run.first = FirstDivergence(divergence, seen, evidence, explain(divergence, evidence))
    run.outcome = "divergence"


def choose_talker(trace: Trace, options: Options) -> Talker:
    """The talker of the options, else the trace's own (inline or by name), else ``hidden-only``."""
    if options.talker is not None:
        return load_talker(options.talker)
    own = trace.header.talker
    if isinstance(own, Talker):
        check_talker(own, trace.path)
        return own
    try:
        if own is not None and own.endswith((".yaml", ".yml")):
            return load_talker(str(Path(trace.path).parent / own))  # beside the trace, wherever that lies
        return load_talker(own or "hidden-only")
    except UsageError as error:
        raise FileError(trace.path, error.what, error.remedy) from None


def choose_grade(trace: Trace, options: Options) -> Grade:
    """The truth of the options, else content where the trace has token ids. CannotJudge where that cannot be."""
    if options.truth == "content" and trace.header.content == "none":
        raise CannotJudge(
            f"{trace.path}: the trace carries no token ids, so content cannot be the truth", "use --truth provenance"
        )
    grade = options.truth or ("provenance" if trace.header.content == "none" else "content")
    if grade == "provenance" and options.rows == "recorded":
        raise CannotJudge(
            f"{trace.path}: recorded rows are matched by token ids, so provenance cannot be the truth",
            "use --truth content, or --rows owner",
        )
    return grade


def _check_keys(trace: Trace, rows: RowSource) -> None:
    if len(rows.row_keys) > MAX_ROW_KEYS:
        what = f"talker {rows.talker.name!r} has {len(rows.row_keys)} keys with a row a token, more than {MAX_ROW_KEYS}"
        raise CannotJudge(f"{trace.path}: {what}", "judge some of them at a time")


def _check_memory(trace: Trace, rows: RowSource, options: Options) -> None:
    """Refuse before anything is allocated: the storage of the cache, and what the truth keeps a slot."""
    num_slots = trace.header.cache.num_blocks * trace.header.cache.block_size
    needed = num_slots * (_TRUTH_NBYTES + sum(rows.row_nbytes(key) + _STAMP_NBYTES for key in rows.row_keys))
    limit = options.max_memory if options.max_memory is not None else _free_memory()
    if limit is not None and needed > limit:
        raise SetupError(
            f"{trace.path}: a cache of {num_slots:,} slots for talker {rows.talker.name!r} needs "
            f"{_size(needed)}, and {_size(limit)} may be used",
            "use a narrower --talker, or raise --max-memory",
        )


def _size(num_bytes: int) -> str:
    units = ("bytes", "KiB", "MiB", "GiB")
    power = min(len(units) - 1, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:,.{1 if power else 0}f} {units[power]}"


_TRUTH_NBYTES = 25  # SlotLedger: two uint64, two int32 and a bool a slot
_STAMP_NBYTES = 8  # a cache that knows what it wrote keeps at least this a row


def _free_memory() -> int | None:
    """Bytes that may be had, as far as this platform tells: what Linux can free, and the limit of a container."""
    told = [number for file, field in _MEMORY.items() if (number := _number(Path(file), field)) is not None]
    return min(told, default=None)


_MEMORY = {
    "/proc/meminfo": r"MemAvailable: +(\d+) kB",
    "/sys/fs/cgroup/memory.max": r"(\d+)\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": r"(\d+)\n",
}


def _number(file: Path, field: str) -> int | None:
    try:
        found = re.search(field, file.read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) * (1024 if field.endswith("kB") else 1)


def _notes(rows: RowSource) -> list[str]:
    return [
        f"key {key!r}: its rows have room for {bits} bits of identity, so a wrong row passes for the right one "
        f"{f'once in {2**bits:,}' if bits else 'always'}"
        for key, bits in rows.narrow_keys().items()
    ]
