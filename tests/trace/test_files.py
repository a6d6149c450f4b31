"""A file that cannot be used is refused in one line that begins with its place; a good one is written whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from omnisim.errors import CannotJudge, FileError, IllegalSchedule
from omnisim.trace import Header, StepRecord, convert, files, jsonl, load, save, yamlform
from omnisim.trace.model import encode_json
from omnisim.trace.story import story_trace

STORY = "new A c=0 n=8 [1,2] / run A [1,2,3]; new B c=4 n=2 [1,4] / fin A; run B"
TRACE = story_trace(STORY)
HEADER = encode_json(TRACE.header)
LINES = [encode_json(record) for record in TRACE.records()]
GOOD = b"\n".join([HEADER, *LINES, b""])

HEAD = "format: omnisim-trace/1\nproducer: {name: test}\ncache: {num_blocks: 8, block_size: 4}\n"
STEP = "- {req_ids: [A], num_computed_tokens: [0], num_scheduled_tokens: [1]}\n"


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    """What reading all of ``path`` is refused with, the folder left out."""
    with pytest.raises(FileError) as error:
        for _ in load(path).steps():
            pass
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(f"{path.parent}/")


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "an empty file": (
        b"",
        't.jsonl:1: the file is empty; the first line is {"format":"omnisim-trace/1","producer":{...},"cache":{...}}',
    ),
    "no header": (
        b"\n" + LINES[0] + b"\n",
        't.jsonl:1: there is no header; the first line is {"format":"omnisim-trace/1","producer":{...},"cache":{...}}',
    ),
    "a cut header": (HEADER[:30], "t.jsonl:1: the line is cut before the header ends; nothing of it can be read"),
    "another version": (
        GOOD.replace(b"trace/1", b"trace/2"),
        "t.jsonl:1: format 'omnisim-trace/2' is not known; this omnisim reads 'omnisim-trace/1'",
    ),
    "a record first": (
        b"\n".join(LINES),
        "t.jsonl:1: object contains unknown field req_ids; see the schema for the fields there are",
    ),
    "an unknown field": (
        GOOD.replace(b'"req_ids":["A"]', b'"requests":["A"]'),
        "t.jsonl:2: object contains unknown field requests; see the schema for the fields there are",
    ),
    "a field that is missing": (
        HEADER + b'\n{"req_ids":[],"num_computed_tokens":[]}\n',
        "t.jsonl:2: object missing required field num_scheduled_tokens; add it",
    ),
    "a key that is there twice": (
        GOOD.replace(b'"req_ids":["A"]', b'"req_ids":["A"],"req_ids":["A"]'),
        "t.jsonl:2: the key 'req_ids' is there twice; keep one of them",
    ),
    "a key that is there twice within": (
        GOOD.replace(b'"block_ids":{"A":[1,2]}', b'"block_ids":{"A":[3,4],"A":[1,2]}'),
        "t.jsonl:2: the key 'A' is there twice; keep one of them",
    ),
    "a header's key that is there twice": (
        GOOD.replace(b'"producer"', b'"producer":{"name":"x"},"producer"'),
        "t.jsonl:1: the key 'producer' is there twice; keep one of them",
    ),
    "a wrong type": (
        GOOD.replace(b'"num_computed_tokens":[0]', b'"num_computed_tokens":["0"]'),
        "t.jsonl:2: num_computed_tokens[0]: expected int, got str",
    ),
    "a number as a request id": (
        GOOD.replace(b'"req_ids":["A"]', b'"req_ids":[1]'),
        "t.jsonl:2: req_ids[0]: expected str, got int; put it in quotes",
    ),
    "a fraction": (
        GOOD.replace(b'"num_computed_tokens":[0]', b'"num_computed_tokens":[0.5]'),
        "t.jsonl:2: num_computed_tokens[0]: expected int, got float",
    ),
    "NaN": (
        HEADER + b'\n{"num_computed_tokens":[NaN],"num_scheduled_tokens":[1]}\n',
        "t.jsonl:2: the line is not JSON (JSON is malformed: invalid character (byte 24)); a line is one JSON object",
    ),
    "a negative count": (
        GOOD.replace(b'"num_computed_tokens":[0]', b'"num_computed_tokens":[-1]'),
        "t.jsonl:2: num_computed_tokens[0]: expected int >= 0",
    ),
    "nothing scheduled": (
        GOOD.replace(b'"num_scheduled_tokens":[8]', b'"num_scheduled_tokens":[0]'),
        "t.jsonl:2: num_scheduled_tokens[0]: expected int >= 1",
    ),
    "a huge count": (
        GOOD.replace(b'"num_computed_tokens":[0]', b'"num_computed_tokens":[9223372036854775808]'),
        "t.jsonl:2: num_computed_tokens[0]: expected int <= 2147483647",
    ),
    "a huge token id": (
        GOOD.replace(b'"prompt_token_ids":[1,', b'"prompt_token_ids":[9223372036854775808,'),
        "t.jsonl:2: scheduled_new_reqs[0].prompt_token_ids[0]: expected int <= 9223372036854775807",
    ),
    "bytes that are not UTF-8": (
        GOOD.replace(b'"req_ids":["A"]', b'"req_ids":["\xff"]'),
        "t.jsonl:2: the line is not JSON (Invalid UTF-8 encoded string); a line is one JSON object",
    ),
    "two objects on a line": (
        GOOD.replace(LINES[1] + b"\n", LINES[1]),
        "t.jsonl:3: the line is not JSON (JSON is malformed: trailing characters "
        f"(byte {len(LINES[1]) + 1})); a line is one JSON object",
    ),
    "an empty line": (
        GOOD.replace(LINES[1], b""),
        "t.jsonl:3: the line is empty; a line is one JSON object",
    ),
    "a cut line": (
        GOOD[:-10],
        "t.jsonl:4: the line is cut, good up to step 1; read it with --steps :2",
    ),
    "a first step that is cut": (
        HEADER + b"\n" + LINES[0][:20],
        "t.jsonl:2: the line is cut before the first step ends; no step of it can be read",
    ),
    "deep nesting": (
        HEADER + b"\n" + b"[" * 1_000_000,
        "t.jsonl:2: expected object, got array",
    ),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_lines_are_refused_with_their_place(kind: str, tmp_path: Path) -> None:
    content, message = BAD_LINES[kind]
    assert refusal(written(tmp_path, "t.jsonl", content)) == message


def test_what_cannot_have_happened_has_the_place_of_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "t.jsonl", GOOD.replace(b'"num_computed_tokens":[8,4]', b'"num_computed_tokens":[7,4]'))
    with pytest.raises(IllegalSchedule, match=r"t\.jsonl:3: step 1, request A: num_computed_tokens is 7"):
        list(load(path).steps())


def test_steps_before_the_cut_can_be_read(tmp_path: Path) -> None:
    steps = load(written(tmp_path, "t.jsonl", GOOD[:-10])).steps()
    assert [next(steps).index, next(steps).index] == [0, 1]
    with pytest.raises(FileError, match="good up to step 1"):
        next(steps)


def test_a_last_line_may_lack_its_newline(tmp_path: Path) -> None:
    assert len(list(load(written(tmp_path, "t.jsonl", GOOD[:-1])).steps())) == 3


def test_json_may_be_written_with_spaces(tmp_path: Path) -> None:
    spaced = "\r\n".join(json.dumps(json.loads(line)) for line in (HEADER, *LINES))
    trace = load(written(tmp_path, "t.jsonl", spaced.encode()))
    assert list(trace.records()) == list(TRACE.records())


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE", 1000)
    assert refusal(written(tmp_path, "t.jsonl", HEADER + b"\n" + b" " * 1001)) == (
        "t.jsonl:2: the line is longer than 1000 bytes; a line is one step"
    )


def packed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def test_cut_zstd_is_refused_with_the_last_good_step(tmp_path: Path) -> None:
    half = GOOD[: GOOD.index(LINES[2]) + 5]
    content = packed(half) + packed(GOOD[len(half) :])[:-8]
    message = refusal(written(tmp_path, "t.jsonl.zst", content))
    assert message == "t.jsonl.zst:4: the zstd stream is cut, good up to step 1; read it with --steps :2"


def test_zstd_that_is_cut_early_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, "t.jsonl.zst", packed(GOOD)[:20]))
    assert message == "t.jsonl.zst:1: the zstd stream is cut before the header ends; nothing of it can be read"


def test_damaged_zstd_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, "t.jsonl.zst", GOOD))
    assert message.startswith("t.jsonl.zst:1: the zstd stream is damaged (")
    content = bytearray(packed(GOOD))
    content[-1] ^= 0xFF
    assert "damaged" in refusal(written(tmp_path, "u.jsonl.zst", bytes(content)))


def test_a_file_of_several_zstd_frames_is_one_stream(tmp_path: Path) -> None:
    content = b"".join(packed(GOOD[at : at + 50]) for at in range(0, len(GOOD), 50))
    assert list(load(written(tmp_path, "t.jsonl.zst", content)).records()) == list(TRACE.records())


BAD_YAML: dict[str, tuple[str, str]] = {
    "an empty file": ("", "t.yaml:1: the file is empty; it starts with format: omnisim-trace/1"),
    "no trace": ("just text\n", "t.yaml:1: expected object, got str"),
    "another version": (
        HEAD.replace("trace/1", "trace/9") + "steps: []\n",
        "t.yaml:1: format 'omnisim-trace/9' is not known; this omnisim reads 'omnisim-trace/1'",
    ),
    "an unknown field": (
        HEAD + "steps:\n" + STEP + STEP.replace("req_ids", "requests"),
        "t.yaml:6: steps[1]: object contains unknown field requests; see the schema for the fields there are",
    ),
    "neither steps nor story": (HEAD, "t.yaml:1: a trace has either steps or a story; give one of the two"),
    "both steps and story": (
        HEAD + "steps: []\nstory: fin A\n",
        "t.yaml:1: a trace has either steps or a story; give one of the two",
    ),
    "a duplicate key": (
        HEAD + "content: none\nsteps: []\ncontent: none\n",
        "t.yaml:6: the key 'content' is there twice; keep one of them",
    ),
    "a number as a request id": (
        HEAD + "steps:\n" + STEP.replace("[A]", "[1]"),
        "t.yaml:5: steps[0].req_ids[0]: expected str, got int; put it in quotes",
    ),
    "a number as the key of a row": (
        HEAD + "steps:\n- req_ids: ['1']\n  block_ids:\n    1: [2]\n  num_computed_tokens: [0]\n",
        "t.yaml:7: a key of steps[0].block_ids: expected str, got int; put it in quotes",
    ),
    "NaN": (
        HEAD + "steps:\n" + STEP.replace("[0]", "[.nan]"),
        "t.yaml:5: steps[0].num_computed_tokens[0]: expected int, got str",
    ),
    "a negative count": (
        HEAD + "steps:\n" + STEP.replace("[0]", "[-1]"),
        "t.yaml:5: steps[0].num_computed_tokens[0]: expected int >= 0",
    ),
    "a huge count": (
        HEAD + "steps:\n" + STEP.replace("[0]", f"[{2**63}]"),
        "t.yaml:5: steps[0].num_computed_tokens[0]: expected int <= 2147483647",
    ),
    "an alias bomb": (
        HEAD + "a: &a [x, x]\nb: &b [*a, *a]\nsteps: [*b, *b]\n",
        "t.yaml:4: 'a' is an anchor or an alias; write the value out",
    ),
    "a tag": (
        HEAD + "steps: !!python/object/apply:os.system [echo]\n",
        "t.yaml:4: 'tag:yaml.org,2002:python/object/apply:os.system' is a tag; leave it out",
    ),
    "two documents": (
        HEAD + "steps: []\n---\n" + HEAD,
        "t.yaml:5: a second document starts here; one trace a file",
    ),
    "a list as a key": (
        HEAD + "? [a]\n: b\n",
        "t.yaml:4: a list or mapping is used as a key; a key is a word or a number",
    ),
    "deep nesting": (HEAD + "steps: " + "[" * 40 + "]" * 40, "t.yaml:4: it is nested more than 32 deep; no trace is"),
    "broken YAML": (
        HEAD + "steps: [\n",
        "t.yaml:5: this is not YAML (did not find expected node content); mind the indent",
    ),
    "a schedule that cannot be": (
        HEAD + "steps:\n# a comment\n" + STEP,
        "t.yaml:6: step 0, request A: it is scheduled and was never new, or has finished; "
        "enter it in scheduled_new_reqs",
    ),
    "a story nobody understands": (
        HEAD + "story: |\n  new A c=0 n=4 [1]\n  walk A\n",
        "t.yaml:6: 'walk' is nothing that happens; "
        "it is one of new, run, resume, replace, fin, preempt, pad, slots, no, clobber, late, fail",
    ),
    "a story that cannot be": (
        HEAD + "story: |\n  new A c=0 n=4 [1]\n\n  run A c=4 n=1\n",
        "t.yaml:7: step 1, request A: positions 4 to 4 reach past the 4 that its 1 blocks cover; "
        "list every block that it holds",
    ),
}


@pytest.mark.parametrize("kind", BAD_YAML)
def test_bad_yaml_is_refused_with_its_place(kind: str, tmp_path: Path) -> None:
    content, message = BAD_YAML[kind]
    assert refusal(written(tmp_path, "t.yaml", content.encode())) == message


def test_yaml_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "t.yaml", HEAD.encode() + b"provenance: \xff\n")
    assert refusal(path) == "t.yaml:4: byte 0xff is not UTF-8; save it as UTF-8"


def test_yaml_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamlform, "MAX_BYTES", 10)
    path = written(tmp_path, "t.yaml", HEAD.encode())
    assert refusal(path) == "t.yaml: it is larger than 10 bytes; write so much as .jsonl"


def test_words_that_other_readers_of_yaml_take_for_something_else_are_text(tmp_path: Path) -> None:
    content = HEAD + "story: |\n  fin A\nprovenance: no\nexpect: {on: agreement, 010: crash}\n"
    header = load(written(tmp_path, "t.yaml", content.encode())).header
    assert header.provenance == "no"
    assert header.expect == {"on": "agreement", "010": "crash"}


def test_a_path_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    written(tmp_path, "t.txt", b"")
    assert refusal(tmp_path / "none.jsonl") == "none.jsonl: there is no such file; check the path"
    assert refusal(tmp_path / "folder.jsonl") == "folder.jsonl: this is a folder; name a trace in it"
    assert refusal(tmp_path / "t.txt") == (
        "t.txt: this is no name of a trace; a trace ends in .jsonl.zst, .jsonl, .yaml, .yml"
    )


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "t.jsonl", GOOD)

    def deny(*_: object) -> Iterator[bytes]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(jsonl, "_lines", deny)
    assert refusal(path) == "t.jsonl: it cannot be read (Permission denied); check the path and its permissions"


def test_a_trace_is_overwritten_only_if_that_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "t.jsonl", b"precious")
    with pytest.raises(FileError) as error:
        save(path, TRACE.header, TRACE.records())
    assert str(error.value) == (f"{path}: it exists already; choose another name, or say --overwrite")
    assert path.read_bytes() == b"precious"
    save(path, TRACE.header, TRACE.records(), overwrite=True)
    assert path.read_bytes() == GOOD


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> Iterator[StepRecord]:
        yield next(TRACE.records())
        raise RuntimeError("the engine died")

    path = written(tmp_path, "t.jsonl", b"precious")
    with pytest.raises(RuntimeError):
        save(path, TRACE.header, failing(), overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]
    assert path.read_bytes() == b"precious"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none" / "t.yaml"
    with pytest.raises(FileError) as error:
        save(path, TRACE.header, TRACE.records())
    assert str(error.value) == f"{path}: it cannot be written (No such file or directory); check the folder"


def test_a_trace_can_be_read_again_and_again(tmp_path: Path) -> None:
    trace = load(written(tmp_path, "t.jsonl", GOOD))
    assert [step.index for step in trace.steps()] == [step.index for step in trace.steps()] == [0, 1, 2]


def ids_of(path: Path) -> list[tuple[int, ...]]:
    return [new.prompt_token_ids for record in load(path).records() for new in record.scheduled_new_reqs]


def test_hashes_keep_equal_prefixes_equal_and_nothing_else(tmp_path: Path) -> None:
    source = story_trace("new A c=0 n=8 [1,2] content=x / run A n=4 drafts=3 [1,2,3]; new B c=4 n=4 [1,4] / run A c=10")
    save(tmp_path / "t.yaml", source.header, source.records())
    for name in ("one.yaml", "two.jsonl"):
        convert(tmp_path / "t.yaml", tmp_path / name, content="hashed")
        assert load(tmp_path / name).header.content == "hashed"
        assert len(list(load(tmp_path / name).steps())) == 3
    (a, b), again = ids_of(tmp_path / "one.yaml"), ids_of(tmp_path / "two.jsonl")
    assert a[:4] == b[:4]
    assert not set(a[4:]) & set(b[4:])
    assert not set(a) & set(again[0]), "another key"
    assert max(a) > 2**32
    tags = [new.content for record in load(tmp_path / "one.yaml").records() for new in record.scheduled_new_reqs]
    assert [len(tag) for content in tags for tag in content.values()] == [16]


def test_equal_chunks_behind_different_prefixes_have_different_hashes(tmp_path: Path) -> None:
    prompts = ([1, 7, 7], [2, 7, 7])
    steps = "".join(
        f"- {{req_ids: [R{row}], scheduled_new_reqs: [{{req_id: R{row}, prompt_token_ids: {prompt}}}],"
        f" num_computed_tokens: [0], num_scheduled_tokens: [3], block_ids: {{R{row}: [{row + 1}]}}}}\n"
        for row, prompt in enumerate(prompts)
    )
    convert(written(tmp_path, "t.yaml", (HEAD + "steps:\n" + steps).encode()), tmp_path / "h.yaml", content="hashed")
    first, second = ids_of(tmp_path / "h.yaml")
    assert len(set(first + second)) == 6


def test_level_none_keeps_lengths_only(tmp_path: Path) -> None:
    source = story_trace("new A c=0 n=8 [1,2] content=secret / run A n=4 drafts=3 [1,2,3] / run A c=9")
    save(tmp_path / "t.yaml", source.header, source.records())
    convert(tmp_path / "t.yaml", tmp_path / "none.yaml", content="none")
    steps = list(load(tmp_path / "none.yaml").steps())
    assert [step.num_prompt_tokens for step in steps] == [(8,)] * 3
    assert steps[1].scheduled_spec_decode_tokens == {"A": (0, 0, 0)}
    assert "secret" not in (tmp_path / "none.yaml").read_text()
    assert not any(any(step.new_token_ids) for step in steps)
    with pytest.raises(CannotJudge, match="has no token ids that could be hashed"):
        convert(tmp_path / "none.yaml", tmp_path / "h.yaml", content="hashed")


def test_public_names_are_there() -> None:
    assert set(files.__all__) <= set(dir(files))
    assert isinstance(TRACE.header, Header)
