"""Released caches under the recordings of a real engine: what goes wrong where, counted a second time by other code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from omnisim.errors import OmnisimError
from omnisim.expectations import expectations
from omnisim.subjects.store import RELEASES
from omnisim.verify import Options, Run
from omnisim.workers import Worker

from ..defects import paths
from ..releases import release

TRACES = Path(__file__).parents[2] / "traces" / "recorded"
WRONG = {
    "chat-abort": (23, 303),
    "chat-burst": (21, 329),
    "chat-roomy": (24, 331),
    "chat-roomy-nocache": (0, 337),
    "chat-tight": (24, 330),
}
"""Outputs of ``deferred-codes`` that vllm-omni 0.22 to 0.28 hand out wrong, of all."""


@pytest.fixture(scope="module", params=RELEASES)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """One process for each release, for all tests of it."""
    with Worker(release(request.param)) as worker:
        yield worker


def counts(run: Run, key: str = "codes.audio") -> tuple[int, int]:
    tally = run.tally.keys[key]
    return tally.outputs_wrong, tally.outputs_checked


def test_deferred_codes_go_wrong_in_the_releases_that_stage_them_by_slots(worker: Worker) -> None:
    version = worker.subject.partition(":")[2]
    for name, (wrong, checked) in WRONG.items():
        run = worker.verify(TRACES / f"{name}.jsonl.zst", Options(talker="deferred-codes"))
        if version == "0.20.0" or version == "0.30.0":  # which cannot defer, and stores at once
            assert (run.outcome, counts(run)) == ("agreement", (0, checked))
        else:
            assert (run.outcome, counts(run)) == ("divergence" if wrong else "agreement", (wrong, checked))


def outcome_of(worker: Worker, path: Path) -> str:
    try:
        return worker.verify(path, Options()).outcome
    except OmnisimError:
        return "unusable"


def test_every_defect_comes_of_each_release_as_its_trace_expects(worker: Worker) -> None:
    came = {path.stem: outcome_of(worker, path) for path in paths()}
    assert came == {path.stem: expectations(path, worker.subject)[worker.subject] for path in paths()}


def test_a_user_is_told_whose_codes_reach_the_next_stage() -> None:
    with Worker(release("0.28.0")) as worker:
        options = Options(talker="deferred-codes")
        run = worker.verify(TRACES / "chat-roomy.jsonl.zst", options)
        first = run.first
        assert first is not None
        assert (first.divergence.step, first.divergence.position, first.divergence.check) == (1, 0, "never-written")
        assert first.explanation == (
            "The row was never written: it is what fresh storage holds. Slot 32 was last computed in step 0: "
            "position 0 of req-0-813a5031, which is still running."
        )
        told = set()
        for step in range(2, run.steps):
            later = worker.verify(
                TRACES / "chat-roomy.jsonl.zst", Options(talker="deferred-codes", steps=(step, step + 1))
            )
            if later.first is not None:
                told.add(later.first.explanation.partition(". ")[0])
        assert "The row is of another content: position 32 of req-4-b9ec6967, written in step 2 by a reader" in {
            said.partition(" of the shared block")[0] for said in told
        }


@pytest.mark.parametrize("talker", ["hidden-only", "deferred-codes"])
@pytest.mark.parametrize("name", WRONG)
def test_a_late_read_of_030_agrees_as_ours_does(worker_030: Worker, name: str, talker: str) -> None:
    path = TRACES / f"{name}.jsonl.zst"
    key = "hidden_states" if talker == "hidden-only" else "codes.audio"
    with Worker("builtin") as ours:
        expected = ours.verify(path, Options(talker=talker))
    for delay in (0, 1, 3):
        run = worker_030.verify(path, Options(talker=talker, read_delay=delay))
        assert (run.outcome, counts(run, key)) == ("agreement", counts(expected, key)), delay


@pytest.mark.parametrize(
    ("talker", "outcome", "words"),
    [
        ("thinker", "divergence", ""),  # a value a request, in a step of as many tokens as requests
        ("late-codes", "crash", "RuntimeError in step 2: The size of tensor a"),
        ("tts", "crash", "IndexError in step 0: tuple index out of range"),  # a value without dimensions
    ],
)
def test_what_030_does_under_talkers_that_it_does_not_know(
    worker_030: Worker, talker: str, outcome: str, words: str
) -> None:
    run = worker_030.verify(TRACES / "chat-roomy.jsonl.zst", Options(talker=talker))
    assert run.outcome == outcome
    assert run.error.startswith(words)


@pytest.fixture(scope="module")
def worker_030() -> Iterator[Worker]:
    with Worker(release("0.30.0")) as worker:
        yield worker


def test_nothing_is_ever_written_on_a_host_without_cuda() -> None:
    with Worker(release("0.28.0")) as worker:
        path = TRACES / "chat-roomy.jsonl.zst"
        outcomes = {mode: worker.verify(path, Options(write_mode=mode)) for mode in ("sync", "pending", "off")}
        assert [run.outcome for run in outcomes.values()] == ["agreement", "agreement", "divergence"]
        assert counts(outcomes["off"], "hidden_states")[0] == 25, "every hit"
        late = worker.verify(TRACES / "chat-burst.jsonl.zst", Options(write_mode="pending"))
        assert counts(late, "hidden_states") == (5, 329), "every hit of a block that is computed in the same step"


# The same counts, made again: what 0.28's class does with a recording, and a comparison that knows nothing of omnisim


def test_our_counts_are_those_of_a_naive_count() -> None:
    release("0.28.0")
    for name, expected in WRONG.items():
        assert naive_count(name) == expected


def naive_count(name: str) -> tuple[int, int]:
    """Outputs that differ from the codes of the request's own tokens, and all.

    Only what the class of 0.22 to 0.28 does to deferred codes, retold: a chunk of n tokens is kept under the position
    that is n before its own, for the count that it is told has not been raised yet; when a request finishes while it
    is in the batch, its chunks go to the slots of these positions; a new request that hits reads the slots.
    """
    text = zstandard.ZstdDecompressor().stream_reader((TRACES / f"{name}.jsonl.zst").read_bytes()).read().decode()
    header, *records = map(json.loads, text.splitlines())
    size = header["cache"]["block_size"]
    slots: dict[int, Any] = {}
    ids: dict[str, list[int]] = {}
    blocks: dict[str, list[int]] = {}
    kept: dict[str, list[tuple[int, list[Any]]]] = {}
    delivered: dict[str, int] = {}
    batch: list[str] = []
    wrong = checked = 0

    def slot(req_id: str, position: int) -> int:
        return int(blocks[req_id][position // size] * size + position % size)

    for record in records:
        for req_id in record.get("finished_req_ids", ()):
            chunks = sorted(kept.pop(req_id, ()), key=lambda chunk: chunk[0]) if req_id in batch else ()
            for first, codes in chunks:
                slots.update({slot(req_id, first + at): code for at, code in enumerate(codes)})
        batch = record.get("req_ids", batch)
        new = {request["req_id"]: request for request in record.get("scheduled_new_reqs", ())}
        ids.update({req_id: list(request["prompt_token_ids"]) for req_id, request in new.items()})
        blocks.update({req_id: list(row) for req_id, row in record.get("block_ids", {}).items()})
        for req_id, more in record.get("new_block_ids", {}).items():
            blocks[req_id] = [*(blocks[req_id] if req_id not in record.get("resumed_req_ids", ()) else []), *more]
        told = record.get("new_token_ids") or [[] for _ in batch]
        for at, req_id in enumerate(batch):
            ids[req_id] += told[at]
            start, count = record["num_computed_tokens"][at], record["num_scheduled_tokens"][at]
            due = [tuple(ids[req_id][: position + 1]) for position in range(start + count)]
            if req_id in new:
                wrong += [slots.get(slot(req_id, position)) for position in range(start)] != due[:start]
            else:
                wrong += delivered[req_id] < start
            checked += 1
            delivered[req_id] = max(delivered.get(req_id, 0), start + count)
            kept.setdefault(req_id, []).append((max(0, start - count), due[start:]))
    return wrong, checked


# Apart


def test_without_vllm_the_releases_that_need_it_say_so() -> None:
    tell = (
        "import sys; sys.modules['vllm'] = None\n"
        "from omnisim.errors import SetupError; from omnisim.subjects import make_subject\n"
        "try: make_subject(sys.argv[1])\nexcept SetupError as error: print(error)"
    )
    for version in RELEASES:
        command = [sys.executable, "-c", tell, release(version)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        needs = f"vllm-omni:{version} needs vLLM, which is not installed here; from a checkout of omnisim: pip install"
        assert told.startswith(needs) if version != "0.30.0" else told == ""


def test_two_versions_in_one_command_do_not_meet(tmp_path: Path) -> None:
    from omnisim.matrix import run_all

    subjects = [release("0.28.0"), release("0.30.0"), release("0.22.0")]
    path = TRACES / "chat-roomy.jsonl.zst"
    runs = run_all({subject: [path] for subject in subjects}, Options(talker="deferred-codes"))
    assert [runs[path, subject].outcome for subject in subjects] == ["divergence", "agreement", "divergence"]
    assert not [name for name in sys.modules if name.startswith("vllm_omni")], "and none is imported here"
