"""A scenario as a value: the engine, the traffic that comes to it, and what happens meanwhile."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from omnisim.errors import FileError, UsageError
from omnisim.trace import yamlform

__all__ = [
    "FORMAT",
    "Abort",
    "Amount",
    "Arrivals",
    "Distribution",
    "EngineSpec",
    "Event",
    "Group",
    "Scenario",
    "Segment",
    "StepTime",
    "read_scenario",
    "scenario_folder",
    "scenario_names",
]

FORMAT = "omnisim-scenario/1"

Tokens = Annotated[int, Meta(ge=1, le=2**24)]
"""Of a request or a step: more than any engine takes."""
Some = Annotated[int, Meta(ge=1, le=2**20)]
Several = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Time = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$", max_length=128)]


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class EngineSpec(_Strict, frozen=True, kw_only=True):
    """What vLLM is told of the engine, by vLLM's names; defaults are those of its configuration classes.

    Asynchronous scheduling is off unless it is asked for, while a server of vLLM's turns it on where it can.
    ``num_blocks`` counts the null block; left out, there is room for four of the longest requests. ``max_model_len``
    left out is what the longest request needs. ``reorder_batch_threshold`` is the attention backend's (FlashInfer: 1):
    decodes come first in the batch; left out, the batch is not reordered. ``cudagraph_capture_sizes``: the tokens of a
    step are padded to the next of these. ``num_speculative_tokens`` drafts follow each sampled token; each draft is
    right with the chance of ``acceptance_rate``, if all before it are.
    """

    block_size: Annotated[int, Meta(ge=1, le=2**16)] = 16
    num_blocks: Annotated[int, Meta(ge=2, le=2**23)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)] = 128
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**22)] = 2048
    max_model_len: Tokens | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor"] = "sha256"
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    long_prefill_token_threshold: Several = 0
    reorder_batch_threshold: Some | None = None
    cudagraph_capture_sizes: tuple[Tokens, ...] = ()
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=64)] = 0
    acceptance_rate: Annotated[float, Meta(ge=0, le=1)] = 0.7

    def __post_init__(self) -> None:
        if self.num_speculative_tokens and self.async_scheduling:
            raise ValueError("num_speculative_tokens under async_scheduling is not simulated: leave one of them out")


class Distribution(_Strict, frozen=True, kw_only=True):
    """How many, by chance: exactly one of the five, rounded; never less than ``min`` nor more than ``max``.

    ``uniform`` [least, most], both included; ``normal`` [mean, deviation]; ``lognormal`` [median, sigma];
    ``pareto`` [least, alpha], a long tail; ``choice``, each as likely as the others.
    """

    uniform: tuple[int, ...] | None = None
    normal: tuple[float, ...] | None = None
    lognormal: tuple[float, ...] | None = None
    pareto: tuple[float, ...] | None = None
    choice: tuple[Several, ...] | None = None
    min: Annotated[int, Meta(ge=0, le=2**24)] = 1
    max: Tokens = 2**20

    def __post_init__(self) -> None:
        kinds = {name: getattr(self, name) for name in ("uniform", "normal", "lognormal", "pareto", "choice")}
        given = {name: value for name, value in kinds.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"a distribution is one of {', '.join(kinds)}")
        ((name, value),) = given.items()
        if name == "choice" and not value:
            raise ValueError("choice needs something to choose from")
        if name != "choice" and (len(value) != 2 or value[1] < 0 or (name == "uniform" and value[0] > value[1])):
            raise ValueError(f"{name} takes two numbers, {_MEANING[name]}")
        if name == "uniform" and not 0 <= value[0] <= value[1] < 2**31:
            raise ValueError("uniform takes numbers from 0 to 2147483647")
        if name in ("lognormal", "pareto") and not (value[0] > 0 and value[1] > 0):
            raise ValueError(f"{name} takes two positive numbers, {_MEANING[name]}")
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")


_MEANING = {
    "uniform": "[least, most]",
    "normal": "[mean, deviation]",
    "lognormal": "[median, sigma]",
    "pareto": "[least, alpha]",
}

Amount: TypeAlias = Annotated[int, Meta(ge=0, le=2**24)] | Distribution
"""A number, or how to draw one."""


class Segment(_Strict, frozen=True, kw_only=True):
    """A piece of a prompt.

    Tokens are the request's own, or the same wherever the name in ``share`` stands; of ``branches`` variants of it
    request i takes number ``i % branches``. An ``image`` is so many placeholder tokens, all alike; what tells images
    apart is their name, which enters vLLM's block hash (with ``branches``, and the number of the variant).
    """

    tokens: Amount
    share: Name | None = None
    image: Name | None = None
    branches: Some = 1

    def __post_init__(self) -> None:
        if self.share is not None and self.image is not None:
            raise ValueError("a segment is shared text or an image, not both")
        if self.image is not None and self.tokens == 0:
            raise ValueError("an image has one placeholder token at least")
        if self.branches > 1 and self.share is None and self.image is None:
            raise ValueError("branches are variants of what share or image names")


class Arrivals(_Strict, frozen=True, kw_only=True):
    """When the requests of a group come, in steps (in seconds where the scenario has a ``step_time``).

    All at ``at``; or one every ``every`` from then on; or ``poisson`` so many a unit of time; or at the ``times``
    listed, which are taken in turn.
    """

    at: Time = 0.0
    every: Time | None = None
    poisson: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    times: tuple[Time, ...] | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.every, self.poisson, self.times)) > 1:
            raise ValueError("arrivals are one of every, poisson and times")
        if self.times is not None and not self.times:
            raise ValueError("times is empty")


class Abort(_Strict, frozen=True, kw_only=True):
    """Clients that leave: a ``fraction`` of the requests, once so many tokens are computed or have been sampled.

    ``resubmit``: the same request comes again at once under the same id.
    """

    after_computed_tokens: Amount | None = None
    after_output_tokens: Amount | None = None
    fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    resubmit: bool = False

    def __post_init__(self) -> None:
        if (self.after_computed_tokens is None) == (self.after_output_tokens is None):
            raise ValueError("an abort is after_computed_tokens or after_output_tokens")


class Group(_Strict, frozen=True, kw_only=True):
    """``count`` requests (or conversations) of one kind; request i of group ``chat`` is ``chat-i``.

    A prompt is its segments one after the other. With ``turns``, turn k is ``chat-i.k``: its prompt is everything
    before it, the answers too, and ``turn_tokens`` more; it comes ``think`` after the turn before it has ended.
    ``n`` answers to one prompt are ``n`` requests ``0_chat-i``, ``1_chat-i``, as vLLM makes of ``n > 1``.
    ``priority``, ``adapters`` and ``salts`` are taken in turn. ``stops``: the last token stops the request, and the
    engine could not know (under asynchronous scheduling it is a step ahead by then).
    """

    name: Name
    count: Some = 1
    prompt: tuple[Segment, ...]
    output_tokens: Amount = 16
    arrivals: Arrivals = Arrivals()
    turns: Amount = 1
    turn_tokens: Amount = 32
    think: Amount = 0
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    priority: tuple[int, ...] = (0,)
    adapters: tuple[Name, ...] = ()
    salts: tuple[Name, ...] = ()
    stops: bool = False
    abort: Abort | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt has no segment")
        if not self.priority:
            raise ValueError("priority is empty")
        if self.turns != 1 and (self.n > 1 or self.abort is not None):
            raise ValueError("a conversation of several turns has no n and no abort")


class Event(_Strict, frozen=True, kw_only=True):
    """Something done to the engine before its step at ``at``.

    ``abort`` requests; ``resubmit`` them, that is, abort those that are alive and send the same again under the same
    id; ``reset_prefix_cache``, which vLLM refuses while requests hold blocks, unless ``reset_running_requests`` too:
    then all of them are preempted first.
    """

    at: Time
    abort: tuple[str, ...] = ()
    resubmit: tuple[str, ...] = ()
    reset_prefix_cache: bool = False
    reset_running_requests: bool = False

    def __post_init__(self) -> None:
        if not (self.abort or self.resubmit or self.reset_prefix_cache):
            raise ValueError("an event is one of abort, resubmit and reset_prefix_cache")
        if self.reset_running_requests and not self.reset_prefix_cache:
            raise ValueError("reset_running_requests is how to reset_prefix_cache")


class StepTime(_Strict, frozen=True, kw_only=True):
    """How long a step takes, in milliseconds: ``base``, and so much a token and a request. It is made up."""

    base: Annotated[float, Meta(gt=0, le=1e6)] = 8.0
    token: Annotated[float, Meta(ge=0, le=1e6)] = 0.05
    request: Annotated[float, Meta(ge=0, le=1e6)] = 0.02


class Scenario(_Strict, frozen=True, kw_only=True):
    """A scenario file. Time counts executed steps or, with ``step_time``, seconds; it jumps while nobody asks.

    ``traffic`` may be left out of a scenario that lends its engine to somebody's workload.
    """

    format: Literal["omnisim-scenario/1"]
    name: Name
    summary: str
    seed: Several = 0
    engine: EngineSpec = EngineSpec()
    step_time: StepTime | None = None
    traffic: tuple[Group, ...] = ()
    events: tuple[Event, ...] = ()
    talker: str | None = None

    def __post_init__(self) -> None:
        names = [group.name for group in self.traffic]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two groups of traffic are called {name!r}")
        shared: dict[tuple[str | None, str | None], Segment] = {}
        for segment in (segment for group in self.traffic for segment in group.prompt):
            if segment.share or segment.image:
                first = shared.setdefault((segment.share, segment.image), segment)
                if (first.tokens, first.branches) != (segment.tokens, segment.branches):
                    named = segment.share or segment.image
                    raise ValueError(f"{named!r} is shared, and has other tokens or branches in another place")


def read_scenario(name: str) -> tuple[str, yamlform.Node]:
    """A scenario by its name or file: where it is, and its document as nodes that know their lines.

    UsageError for an unknown name, FileError for a file that cannot be read.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _named(name)
    try:
        return str(path), yamlform.parse(path, FORMAT)
    except OSError as error:
        raise FileError(str(path), f"it cannot be read ({error.strerror})", "check the path") from None


def scenario_names() -> tuple[str, ...]:
    """Names of the scenarios that come with omnisim."""
    return tuple(sorted(path.stem for path in scenario_folder().glob("*.yaml")))


def scenario_folder() -> Path:
    """``scenarios`` of an installed wheel, else of the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_scenarios"
    return installed if installed.is_dir() else package.parent / "scenarios"


def _named(name: str) -> Path:
    if name not in scenario_names():
        close = get_close_matches(name, scenario_names(), n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"unknown scenario {name!r}",
            f"{meant}see omnisim simulate --list for those with a name; or name a .yaml file",
        )
    return scenario_folder() / f"{name}.yaml"
