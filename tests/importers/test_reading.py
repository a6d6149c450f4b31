"""What is true of every format: names, options, files that cannot be read, and ledgers that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisim.errors import FileError, UsageError
from omnisim.importers import WORKLOAD_FORMATS, ReadOptions, read_workload
from omnisim.workload import Workload

from .files import block_row, everything, json_lines, read, refusal, written
from .test_lengths import AZURE, BURST, text
from .test_qwen_bailian import CHILD, PARENT

GOOD = {
    "mooncake": json_lines(*(block_row([0, at], 600, timestamp=at) for at in (1, 2, 3))),
    "qwen-bailian": json_lines(PARENT, CHILD, {**CHILD, "chat_id": 3}),
    "azure": text(*AZURE),
    "burstgpt": text(*BURST),
    "sharegpt": json.dumps([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]),
    "vllm-custom": json_lines({"prompt": "abc", "output_tokens": 3}, {"prompt": "abcdef"}, {"prompt": "x"}),
    "blocks": json_lines(*(block_row([0, at], 20, final_hash_ids=[at + 9]) for at in (1, 2, 3))),
}


def test_every_format_is_tried_here() -> None:
    assert set(GOOD) == set(WORKLOAD_FORMATS)


@pytest.mark.parametrize("form", GOOD)
def test_a_file_can_be_read_again_with_the_same_result(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD[form])
    one, other = read(form, path), read(form, path)
    assert [everything(request).tolist() for request in one.requests] == [
        everything(request).tolist() for request in other.requests
    ]


@pytest.mark.parametrize("form", GOOD)
def test_a_file_that_is_none_is_refused(form: str, tmp_path: Path) -> None:
    assert refusal(form, tmp_path / "none") == "none: there is no such file; check the path"
    (tmp_path / "folder").mkdir()
    assert refusal(form, tmp_path / "folder") == "folder: this is a folder; name a file in it"
    head = GOOD[form].encode()
    message = refusal(form, written(tmp_path, head + b"\n\xff\n"))
    line = head.count(b"\n") + 2
    assert message == f"f:{line}: byte 0xff is not UTF-8; save it as UTF-8"


@pytest.mark.parametrize("form", GOOD)
@pytest.mark.parametrize("other", GOOD)
def test_no_format_is_taken_for_another(form: str, other: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD[other])
    if form == other:
        assert read(form, path).ledger.kept
    else:
        assert refusal(form, path)


@pytest.mark.parametrize("form", ["mooncake", "blocks"])
def test_a_trace_whose_blocks_would_fit_but_not_its_times_is_refused(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, json_lines({**PARENT, "input_length": 9, "hash_ids": [1]}))
    assert refusal(form, path) == "f:1: the row has a chat_id, and its times are seconds; read it as qwen-bailian"


FORMATS = "write FORMAT:FILE with one of mooncake, qwen-bailian, azure, burstgpt, sharegpt, vllm-custom, blocks"
MISNAMED = {
    "mooncake": f"'mooncake' names no format and file; {FORMATS}",
    "mooncake:": f"'mooncake:' names no format and file; {FORMATS}",
    "trace.jsonl": f"'trace.jsonl' names no format and file; {FORMATS}",
    ":x": f"':x' names no format; {FORMATS}",
    "moonkake:x": f"'moonkake:x' names no format; did you mean 'mooncake'? {FORMATS}",
}


@pytest.mark.parametrize("name", MISNAMED)
def test_a_format_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as error:
        read_workload(name, ReadOptions())
    assert str(error.value) == MISNAMED[name]


def test_a_path_may_have_a_colon(tmp_path: Path) -> None:
    assert read("mooncake", written(tmp_path, GOOD["mooncake"], name="a:b")).ledger.kept == 3


def test_a_tokenizer_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read_workload("azure:x", ReadOptions(tokenizer="y"))
    assert str(error.value) == ("azure holds no text for a tokenizer; leave it out; of text are sharegpt, vllm-custom")


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"limit": 0}, "a limit of 0 rows leaves nothing; give at least 1"),
    ({"scale_lengths": 0.0}, "--scale-lengths is 0.0; give a number above 0 and up to 1000"),
    ({"scale_lengths": float("nan")}, "--scale-lengths is nan; give a number above 0 and up to 1000"),
    ({"time_scale": -1.0}, "--time-scale is -1.0; give a number above 0 and up to 1000"),
    ({"time_scale": float("inf")}, "--time-scale is inf; give a number above 0 and up to 1000"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        ReadOptions(**options)
    assert str(error.value) == message


LINES = {form: GOOD[form].splitlines(keepends=True) for form in GOOD if form != "sharegpt"}
REFUSALS = (
    "its blocks are not of",
    "final_hash_ids for",
    "rows are of this format",
    "there is no row",
    "has a chat_id",
)
FAILED = BURST[2]
damages = st.lists(
    st.tuples(
        st.sampled_from(("delete", "cut", "garble", "twice")),
        st.integers(0, 2),
        st.integers(0, 200),
        st.characters(codec="utf-8", exclude_characters="\n\r\0"),
    ),
    max_size=3,
)


def damaged(line: str, damage: str, at: int, character: str) -> str:
    """A line with something done to it, between its first character and its end."""
    body = line.rstrip("\r\n")
    at %= max(1, len(body))
    end = line[len(body) :]
    return {
        "delete": "",
        "cut": body[:at] + end,
        "garble": body[:at] + character + body[at + 1 :] + end,
        "twice": line + line,
    }[damage]


def outcome(form: str, path: Path) -> Workload | str:
    """What is read, or the refusal."""
    try:
        return read(form, path)
    except FileError as error:
        return str(error)


@pytest.mark.parametrize("form", LINES)
@given(what=damages)
def test_the_ledger_adds_up_whatever_is_damaged(
    form: str, what: list[tuple[str, int, int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = list(LINES[form])
    head = lines[:1] if form in ("azure", "burstgpt") else []
    rows = lines[len(head) :]
    for damage, number, at, character in what:
        if rows[number]:
            rows[number] = damaged(rows[number], damage, at, character)
    content = "".join([*head, *rows])
    path = written(tmp_path_factory.getbasetemp(), content)
    workload = outcome(form, path)
    if isinstance(workload, str):
        assert workload.startswith(str(path))
        assert any(words in workload for words in REFUSALS)
        return
    assert workload.ledger.rows == content.count("\n") - len(head)
    kept = {int(request.req_id.removeprefix(f"{form}-").partition("-")[0]) for request in workload.requests}
    unhurt = set(LINES[form]) - {f"{FAILED}\r\n"}
    numbered = enumerate(content.split("\n")[len(head) : -1], start=1)
    assert {number for number, row in numbered if f"{row}\n" in unhurt} <= kept
