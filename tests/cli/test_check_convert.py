"""``omnisim check`` and ``omnisim convert``: a line that says what a trace has, and nothing lost that was not to go."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisim.trace import load

from ..defects import paths
from .conftest import Run
from .files import HELLO, ROOT, TIGHT

SUMMARY = "3 steps, 3 requests, 14 tokens; 8 blocks of 4; content tokens; by hand\n"


def test_a_legal_trace_is_one_line(run: Run) -> None:
    assert run("check", HELLO) == (0, f"legal  {HELLO}  {SUMMARY}", "")


def test_every_committed_trace_is_legal_but_for_the_one_that_shows_what_is_not(run: Run) -> None:
    done = run("check", ROOT / "traces")
    others = len([*(ROOT / "traces").glob("*.yaml"), *(ROOT / "traces").rglob("*.jsonl.zst")])
    assert (done.code, done.err.count("\n"), done.out.count("legal  ")) == (2, 1, others + len(paths()) - 1)
    assert "defects/slots-that-lag-behind-the-blocks.yaml:24: step 1, request A: slot_mapping has 4" in done.err


@pytest.mark.parametrize("name", ["t.yaml", "t.yml", "t.jsonl", "t.jsonl.zst"])
@pytest.mark.parametrize("source", [HELLO, TIGHT], ids=lambda path: path.name)
def test_a_conversion_says_what_it_wrote_and_loses_nothing(run: Run, tmp_path: Path, source: Path, name: str) -> None:
    target = tmp_path / name
    done = run("convert", source, target)
    assert (done.code, done.err) == (0, "")
    if source is HELLO:
        assert done.out == f"wrote  {target}  {SUMMARY}"
    assert load(target).header == load(source).header
    assert list(load(target).records()) == list(load(source).records())


def prompt_ids(path: Path) -> set[int]:
    new_requests = (new for record in load(path).records() for new in record.scheduled_new_reqs)
    return {token_id for new in new_requests for token_id in new.prompt_token_ids}


def test_hashed_content_still_agrees_and_no_id_is_in_the_file(run: Run, tmp_path: Path) -> None:
    text = TIGHT.parent / "chat-burst.jsonl.zst"
    target = tmp_path / "hashed.jsonl"
    assert "; content hashed; " in run("convert", text, target, "--content", "hashed").out
    told, kept = prompt_ids(text), prompt_ids(target)
    assert len(told) > 50
    assert not told & kept
    assert min(kept) > 2**32
    done = run("replay", target)
    assert (done.code, done.err) == (0, "")
    assert "truth content" in done.out
    assert run("replay", target, "--subject", "none").code == 1


def test_without_content_the_replay_judges_by_provenance_and_says_so(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "blind.yaml"
    assert "; content none; " in run("convert", HELLO, target, "--content", "none").out
    assert "prompt_token_ids" not in target.read_text()
    assert "new_token_ids" not in target.read_text()
    done = run("replay", target)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"AGREEMENT  {target}  subject builtin, talker hidden-only, truth provenance\n")
    (result,) = run("replay", target, "--json", "-").report["runs"]
    assert (result["truth"], result["rows_checked"]) == ("provenance", 26)
    assert run("replay", target, "--subject", "none").code == 1


def test_a_trace_can_be_converted_onto_itself(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run("convert", HELLO, path)
    assert run("convert", path, path, "--content", "none", "--overwrite").code == 0
    assert load(path).header.content == "none"
    assert [other.name for other in tmp_path.iterdir()] == ["t.jsonl"]
