"""Whatever is wrong with what a user gives is one line on stderr, exit 2, and nothing that looks like a result."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import Done, Run
from .files import BLIND, FIRST, GOOD, HEADER, HELLO, NO_LENGTH, PACKED, ROOT, TIGHT, hit, lines

Written = Callable[[str, bytes | str], Path]

YAML = "format: omnisim-trace/1\nproducer: {name: test}\ncache: {num_blocks: 8, block_size: 4}\n"
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"
COMMANDS = ("replay", "check", "show", "convert")


def first(**fields: object) -> str:
    return lines({**FIRST, **fields})


FILES: dict[str, tuple[str, bytes | str, int | None, str]] = {
    # name of the file, content, line, some words
    "an empty file": ("t.jsonl", "", 1, "the file is empty"),
    "an empty yaml": ("t.yaml", "", 1, "the file is empty"),
    "a cut zstd": ("t.jsonl.zst", PACKED[:-9], None, "cut"),
    "no zstd": ("t.jsonl.zst", b"not zstd", 1, "damaged"),
    "a cut line": ("t.jsonl", GOOD[:-20], 3, "the line is cut, good up to step 0"),
    "another version": ("t.jsonl", GOOD.replace("trace/1", "trace/9"), 1, "'omnisim-trace/9' is not known"),
    "an unknown field": ("t.jsonl", first(num_tokens=4), 2, "unknown field num_tokens"),
    "an unknown field in yaml": ("t.yaml", YAML + "speed: 3\nsteps: []\n", 4, "unknown field speed"),
    "an alias bomb": ("t.yaml", YAML + BOMB, 4, "an anchor or an alias"),
    "a tag": ("t.yaml", YAML + "steps: !!python/object:os.system []\n", 4, "is a tag"),
    "a duplicate key in yaml": ("t.yaml", YAML + "cache: {num_blocks: 9, block_size: 4}\nsteps: []\n", 4, "twice"),
    "a duplicate key": ("t.jsonl", GOOD.replace('"req_ids"', '"req_ids": ["A"], "req_ids"', 1), 2, "twice"),
    "a NaN": ("t.jsonl", GOOD.replace("[4], ", "[NaN], ", 1), 2, "not JSON"),
    "a NaN in yaml": ("t.yaml", YAML.replace("8", ".nan") + "steps: []\n", 3, "expected int"),
    "a negative count": ("t.jsonl", first(num_computed_tokens=[-1]), 2, "num_computed_tokens[0]"),
    "2**63": ("t.jsonl", first(num_scheduled_tokens=[2**63]), 2, "num_scheduled_tokens[0]"),
    "2**63 blocks": ("t.jsonl", GOOD.replace('"num_blocks": 8', f'"num_blocks": {2**63}'), 1, "cache.num_blocks"),
    "a false query_start_loc": ("t.jsonl", first(query_start_loc=[0, 3]), 2, "query_start_loc"),
    "a false slot_mapping": ("t.jsonl", first(slot_mapping=[4, 5, 6, 9]), 2, "slot"),
    "overlapping slots": (
        "t.jsonl",
        lines(
            {
                "req_ids": ["A", "B"],
                "scheduled_new_reqs": [{"req_id": name, "prompt_token_ids": [1, 2, 3, 4]} for name in "AB"],
                "num_computed_tokens": [0, 0],
                "num_scheduled_tokens": [4, 4],
                "block_ids": {"A": [1], "B": [1]},
            }
        ),
        2,
        "slot 4",
    ),
    "a span past its blocks": (
        "t.jsonl",
        first(num_scheduled_tokens=[5], scheduled_new_reqs=[{"req_id": "A", "prompt_token_ids": [1, 2, 3, 4, 5]}]),
        2,
        "block",
    ),
    "a block past the cache": ("t.jsonl", first(block_ids={"A": [8]}), 2, "block"),
    "a request that was never new": ("t.jsonl", first(scheduled_new_reqs=[]), 2, "A"),
    "what is no UTF-8": ("t.yaml", b"format: \xff\n", 1, "UTF-8"),
    "a byte order mark": ("t.jsonl", b"\xef\xbb\xbf" + GOOD.encode(), 1, "byte order mark"),
    "another kind of file": ("t.txt", GOOD, None, "no name of a trace"),
    "an id that would move the cursor": ("t.jsonl", lines({**FIRST, "req_ids": ["\n\x1b[31m"]}), 2, "step 0"),
}


def is_refused(done: Done) -> str:
    """The one line that a refusal is, and nothing else was said."""
    assert done.code == 2, done
    assert done.out == "", done
    return complaint(done)


def complaint(done: Done) -> str:
    assert re.fullmatch(r"omnisim: [^\n]+\n", done.err), done.err
    assert "Traceback" not in done.err
    return done.err


def words(command: str, path: Path) -> list[Path | str]:
    return [command, path, *([path.with_name("out.jsonl")] if command == "convert" else [])]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_wrong_is_one_line_with_its_place(run: Run, written: Written, case: str, command: str) -> None:
    name, content, line, says = FILES[case]
    path = written(name, content)
    told = is_refused(run(*words(command, path)))
    place = f"omnisim: {path}" + (f":{line}: " if line else "")
    assert told.startswith(place), told
    assert says in told
    assert not path.with_name("out.jsonl").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_read_is_one_line(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name in ("missing.yaml", "empty", "folder.yaml", "loop.yaml", "x" * 300 + ".yaml"):
        told = is_refused(run(*words(command, tmp_path / name)))
        assert told.startswith(f"omnisim: {tmp_path / name}: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_can_be_read_but_once_is_refused(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnisim.trace.files.SUFFIXES", ("zero",))
    path = Path("/dev/zero")
    done = run(command, path, *(["/dev/shm/out.jsonl"] if command == "convert" else []))
    assert "this is no regular file; a trace is read more than once" in is_refused(done)


@pytest.mark.parametrize("command", ["replay", "check"])
def test_in_a_folder_the_good_traces_are_still_judged(run: Run, written: Written, tmp_path: Path, command: str) -> None:
    written("a-bad.jsonl", "")
    written("b.jsonl", GOOD)
    written("c-bad.yaml", YAML)
    written("d/e.jsonl.zst", PACKED)
    (tmp_path / "f-dangling.yaml").symlink_to("nowhere.yaml")
    done = run(command, tmp_path)
    assert done.code == 2
    assert [line.split(":")[1].rpartition("/")[2] for line in done.err.splitlines()] == [
        "a-bad.jsonl",
        "c-bad.yaml",
        "f-dangling.yaml",
    ]
    assert len(re.findall(r"^(AGREEMENT|legal) ", done.out, re.MULTILINE)) == 2
    if command == "replay":
        assert "5 traces: agreement 2, unusable 3; 4 outputs judged, 0 wrong" in done.out


def test_a_trace_that_goes_bad_later_is_not_called_good(run: Run, written: Written) -> None:
    path = written("t.jsonl", GOOD + "{}\n")
    for command in COMMANDS:
        is_refused(run(*words(command, path)))
    done = run("replay", path, "--steps", ":2")
    assert done.code == 0
    assert "AGREEMENT" in done.out


# Memory


@pytest.mark.parametrize("options", [[], ["--max-memory", "1T"], ["--max-memory", "600GiB"]])
def test_a_cache_that_does_not_fit_is_refused_before_it_is_made(
    run: Run, written: Written, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("t.jsonl", lines(FIRST, cache={"num_blocks": 2**30, "block_size": 16}))
    monkeypatch.setattr("omnisim.verify.Truth", lambda *_: pytest.fail("it was made"))
    told = is_refused(run("replay", path, *options))
    assert "a cache of 17,179,869,184 slots for talker 'hidden-only' needs 2,576.0 GiB" in told
    assert "--max-memory" in told


def test_the_limit_counts_for_small_caches_too(run: Run, written: Written) -> None:
    path = written("t.jsonl", GOOD)
    assert "may be used" in is_refused(run("replay", path, "--max-memory", "1000"))
    assert run("replay", path, "--max-memory", "10K").code == 0
    assert "may be used" in is_refused(run("replay", path, "--max-memory", "10K", "--talker", "thinker"))


def test_a_trace_that_does_not_fit_does_not_stop_the_others(run: Run, written: Written, tmp_path: Path) -> None:
    written("a.jsonl", lines(FIRST, cache={"num_blocks": 2**30, "block_size": 16}))
    written("b.jsonl", GOOD)
    done = run("replay", tmp_path)
    assert done.code == 2
    assert "AGREEMENT" in done.out


# Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--subject bultin", "unknown subject 'bultin'; did you mean 'builtin'?"),
        ("--subject x", "unknown subject 'x'; known: builtin, none"),
        ("--talker thinkr", "unknown talker 'thinkr'; did you mean 'thinker'? known: deferred-codes, "),
        ("--talker missing.yaml", "missing.yaml: no such talker file"),
        ("--steps 3:1", "--steps '3:1' is not a range of steps; write A:B"),
        ("--steps 3", "--steps '3' is not a range"),
        ("--steps a:b", "is not a range"),
        ("--steps=-3:4", "is not a range"),
        ("--steps 1:2:3", "is not a range"),
        ("--steps 7:9", "the trace has no step in 7:9 that hands anything out"),
        ("--max-memory much", "--max-memory 'much' is not a size; write bytes"),
        ("--max-memory 0", "is not a size"),
        ("--max-memory=-1G", "is not a size"),
        ("--max-memory nan", "is not a size"),
        ("--max-memory inf", "is not a size"),
        ("--rows x", "'--rows'"),
        ("--truth x", "'--truth'"),
        ("--batch x", "'--batch'"),
        ("--device tpu", "'--device'"),
        ("--foo", "--foo; see omnisim replay --help"),
        ("--json", "'--json'"),
        ("--json /nowhere/at/all.json", "/nowhere/at/all.json: the report cannot be written: /nowhere/at is no folder"),
        ("--json .", ".: the report cannot be written: this is a folder; name another file"),
    ],
)
def test_a_wrong_option_is_one_line(run: Run, options: str, says: str) -> None:
    assert says in is_refused(run("replay", HELLO, *options.split()))


def test_a_command_line_without_sense_is_one_line(run: Run) -> None:
    for line in ("replay", "check", "show", "convert", "convert a", "shw x", "show a b", "show x --step -1", "--foo"):
        assert "; see omnisim" in is_refused(run(*line.split()))


def test_an_option_that_no_trace_could_be_replayed_with_is_refused_once(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for options in ("--talker tss", "--subject nope", "--talker missing.yaml"):
        report.write_text('{"outcome": "agreement"}')  # an older verdict, which must not be read as this one's
        is_refused(run("replay", ROOT / "traces", *options.split(), "--json", report))
        assert json.loads(report.read_text())["outcome"] == "unusable"


def test_cuda_without_a_gpu_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = is_refused(run("replay", HELLO, "--device", "cuda"))
    assert told == "omnisim: --device cuda needs a GPU that torch can use, and there is none; use --device cpu\n"


def test_the_batch_of_vllm_without_vllm_is_refused_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    told = is_refused(run("replay", ROOT / "traces", "--batch", "vllm"))
    assert told.startswith("omnisim: --batch vllm needs vLLM, which cannot be imported here (")
    assert "pip install" in told


# What does not fit together


def test_content_is_no_truth_without_token_ids(run: Run, written: Written) -> None:
    path = written("t.jsonl", lines(BLIND, content="none"))
    told = is_refused(run("replay", path, "--truth", "content"))
    assert "no token ids, so content cannot be the truth; use --truth provenance" in told


def test_recorded_rows_that_are_not_there_are_refused(run: Run, tmp_path: Path) -> None:
    assert "has no recorded rows; use --rows owner" in is_refused(run("replay", HELLO, "--rows", "recorded"))
    copy = tmp_path / TIGHT.name
    copy.write_bytes(TIGHT.read_bytes())
    told = is_refused(run("replay", copy, "--rows", "recorded"))
    assert (
        told == f"omnisim: {tmp_path}/chat-tight.safetensors: no such file; the trace names it for its recorded rows\n"
    )


def test_recorded_rows_of_another_trace_are_refused(run: Run, tmp_path: Path) -> None:
    for path in TIGHT.parent.glob("chat-*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat-tight.safetensors").write_bytes((TIGHT.parent / "chat-burst.safetensors").read_bytes())
    told = is_refused(run("replay", tmp_path / TIGHT.name, "--rows", "recorded"))
    assert "chat-tight.safetensors: " in told
    assert "the tensors are of another trace" in told
    (tmp_path / "chat-tight.safetensors").write_bytes(b"no tensors")
    assert "not a safetensors file" in is_refused(run("replay", tmp_path / TIGHT.name, "--rows", "recorded"))


def test_recorded_rows_need_a_talker_that_delivers_hidden_states(run: Run) -> None:
    told = is_refused(run("replay", TIGHT, "--rows", "recorded", "--talker", "tts"))
    assert "talker 'tts' delivers none" in told


TALKER = "format: omnisim-talker/1\nname: mine\nhidden_size: 8\nkeys:\n"


@pytest.mark.parametrize(
    ("keys", "line", "says"),
    [
        ("  k: {kind: rows, shape: [4]}\n", 5, "keys"),
        ("  k: {kind: row, shape: [4], dtype: int128}\n", 5, "int128"),
        ("  k: {kind: row, shape: [-4]}\n", 5, "shape"),
        ("  k: {kind: list, deferred: true}\n", 5, "'k': only rows with a shape can be deferred"),
        ("  k: {kind: nested}\n", 5, "fields"),
        ("  k: {kind: opaque}\n", 5, "kind opaque needs a value"),
        ("  k: {kind: row}\n  k: {kind: row}\n", 6, "twice"),
        ("  hidden_states: {kind: row, shape: [4]}\n", 5, "hidden_size and dtype declare it"),
    ],
)
def test_a_talker_file_that_is_wrong_is_one_line_with_its_place(
    run: Run, written: Written, keys: str, line: int, says: str
) -> None:
    path = written("mine.yaml", TALKER + keys)
    told = is_refused(run("replay", ROOT / "traces", "--talker", path))
    assert told.startswith(f"omnisim: {path}:{line}: ")
    assert says in told


def test_a_talker_of_another_format_is_refused(run: Run, written: Written) -> None:
    told = is_refused(run("replay", HELLO, "--talker", HELLO))
    assert f"{HELLO}:6: this is a trace; omnisim replay takes it" in told


def test_a_file_of_another_kind_is_told_where_it_belongs(run: Run) -> None:
    scenario, talker = ROOT / "scenarios" / "multi-turn.yaml", ROOT / "scenarios" / "talkers" / "tts.yaml"
    for words, told in (
        (("replay", scenario), f"{scenario}:1: this is a scenario; omnisim simulate makes a trace of it"),
        (("check", talker), f"{talker}:1: this is a talker; it goes to --talker"),
        (("simulate", HELLO), f"{HELLO}:6: this is a trace; omnisim replay takes it"),
        (("coverage", HELLO, "--require", talker), f"{talker}:1: this is a talker; it goes to --talker"),
    ):
        assert told in is_refused(run(*words))


def test_a_talker_that_a_trace_names_and_nobody_knows_is_that_traces_fault(
    run: Run, written: Written, tmp_path: Path
) -> None:
    bad = written("a.jsonl", lines(*hit(), talker="thinkr"))
    written("b.jsonl", lines(*hit(), talker="thinker"))
    done = run("replay", tmp_path)
    assert done.code == 2
    assert complaint(done).startswith(f"omnisim: {bad}: unknown talker 'thinkr'; did you mean 'thinker'?")
    assert "talker thinker" in done.out
    assert run("replay", bad, "--talker", "thinker").code == 0


def test_a_talker_may_stand_in_the_trace(run: Run, written: Written) -> None:
    talker = {"format": "omnisim-talker/1", "name": "mine", "hidden_size": 8}
    done = run("replay", written("t.jsonl", lines(*hit(), talker=talker)))
    assert done.code == 0
    assert "talker mine" in done.out
    keys = {"k": {"kind": "list", "deferred": True}}
    told = is_refused(run("replay", written("t.jsonl", lines(*hit(), talker={**talker, "keys": keys}))))
    assert "t.jsonl" in told
    assert "only rows with a shape can be deferred" in told


def test_phases_need_to_know_where_a_prompt_ends(run: Run, written: Written) -> None:
    decode = {"num_computed_tokens": [4], "num_scheduled_tokens": [1], "new_block_ids": {"A": [2]}}
    path = written("t.jsonl", lines(NO_LENGTH, decode, content="none"))
    told = is_refused(run("replay", path, "--talker", "late-codes"))
    assert told == (
        f"omnisim: {path}: talker 'late-codes' emits by phase, and the trace does not say where the prompt of 'A' "
        "ends; give num_prompt_tokens in scheduled_new_reqs, or use a talker whose keys are emitted in all phases\n"
    )
    assert run("replay", path).code == 0


# Nothing is judged that is not there


@pytest.mark.parametrize("steps", [[], [{"num_computed_tokens": [], "num_scheduled_tokens": [], "req_ids": []}]])
def test_a_trace_in_which_nothing_is_handed_out_does_not_agree(
    run: Run, written: Written, steps: list[dict[str, object]]
) -> None:
    path = written("t.jsonl", lines(*steps))
    assert "nothing was judged" in is_refused(run("replay", path))
    assert run("check", path).code == 0
    assert run("show", path).code == 0


# show and convert


def test_show_says_what_there_is_instead(run: Run) -> None:
    assert is_refused(run("show", HELLO, "--step", 3)) == f"omnisim: {HELLO} has no step 3; its last is 2\n"
    assert is_refused(run("show", HELLO, "--request", "D")) == (
        f"omnisim: {HELLO} has no request 'D'; its requests are A, B, C\n"
    )
    assert "did you mean 'req-0-869fa204'?" in is_refused(run("show", TIGHT, "--request", "req-0-869fa2"))


def test_convert_writes_whole_files_only_and_replaces_none_unasked(run: Run, written: Written, tmp_path: Path) -> None:
    there = written("there.jsonl", "mine")
    assert "it exists already; choose another name, or say --overwrite" in is_refused(run("convert", HELLO, there))
    assert there.read_text() == "mine"
    (tmp_path / "dangling.jsonl").symlink_to("nowhere.jsonl")
    assert "it exists already" in is_refused(run("convert", HELLO, tmp_path / "dangling.jsonl"))
    assert "no name of a trace" in is_refused(run("convert", HELLO, tmp_path / "out.json"))
    assert "it cannot be written" in is_refused(run("convert", HELLO, tmp_path / "no" / "out.jsonl"))
    assert "this is a folder" in is_refused(run("convert", HELLO, tmp_path, "--overwrite"))
    blind = written("blind.jsonl", lines(BLIND, content="none"))
    told = is_refused(run("convert", blind, tmp_path / "o.jsonl", "--content", "hashed"))
    assert "no token ids that could be hashed" in told
    assert {path.name for path in tmp_path.iterdir()} == {"there.jsonl", "dangling.jsonl", "blind.jsonl"}
    assert run("convert", HELLO, there, "--overwrite").code == 0
    assert json.loads(there.read_text().splitlines()[0])["cache"] == HEADER["cache"]


# Claims that would cost more than they are worth


def test_what_a_few_bytes_claim_is_refused_before_it_costs(run: Run, written: Written) -> None:
    told = is_refused(run("replay", written("t.jsonl", first(num_tokens_padded=2**31 - 1))))
    assert "t.jsonl:2: step 0, num_tokens_padded is 2147483647, more than 4194304" in told
    deep = '{"kind":"nested","fields":{"a":' * 5000 + '{"kind":"list"}' + "}}" * 5000
    talker = {"format": "omnisim-talker/1", "name": "deep", "hidden_size": 8, "keys": {"k": 0}}
    path = written("t.jsonl", lines(*hit(), talker=talker).replace('{"k": 0}', f'{{"k": {deep}}}'))
    assert is_refused(run("check", path)) == f"omnisim: {path}:1: it is nested too deep; no trace is\n"
    assert "nest" in is_refused(run("check", written("t.yaml", "a: " + "[" * 10_000)))


def test_more_keys_than_can_be_judged_at_once_are_refused(run: Run, written: Written) -> None:
    keys = {f"k{index}": {"kind": "row", "shape": [4]} for index in range(64)}
    talker = {"format": "omnisim-talker/1", "name": "many", "hidden_size": 8, "keys": keys}
    path = written("t.jsonl", lines(*hit(), talker=talker))
    assert "talker 'many' has 65 keys with a row a token, more than 64" in is_refused(run("replay", path))
    del keys["k63"]
    assert run("replay", written("t.jsonl", lines(*hit(), talker=talker))).code == 0


def test_rows_of_a_step_for_which_there_is_no_memory_are_refused(
    run: Run, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> None:
        raise RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 549755813632 bytes")

    monkeypatch.setattr("omnisim.rows.emit.OwnerRows.forward", forward)
    path = written("t.jsonl", GOOD)
    told = is_refused(run("replay", path))
    assert told == f"omnisim: {path}: no memory for the rows of a step; use a narrower --talker\n"
