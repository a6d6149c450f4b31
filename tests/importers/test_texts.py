"""Formats that hold text: equal beginnings of text are equal beginnings of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnisim.errors import SetupError
from omnisim.importers import ReadOptions, read_workload
from omnisim.importers.texts import encoder
from omnisim.workload import Workload

from .files import everything, json_lines, prompt, read, refusal, shared, written

PSEUDO = (
    "There is no tokenizer: 4 UTF-8 bytes of text are a token, with a made-up id. "
    "Equal beginnings of texts have equal tokens; their number is not that of a model."
)


def encode(text: str, **options: Any) -> np.ndarray:
    return encoder(ReadOptions(**options)).encode(text)


def test_four_bytes_of_text_are_a_token() -> None:
    tokens = encode("abcdefghij")
    assert len(tokens) == 3
    assert shared(tokens, encode("abcdefgh")) == shared(tokens, encode("abcdefghik")) == 2
    assert shared(tokens, encode("abcdefghij, and more")) == 2, "a partial token is another one"
    assert len({int(encode(text)[0]) for text in ("a", "a\0", "a\0\0", "a\0\0\0", "\0a")}) == 5
    assert len(encode("né€")) == 2
    assert len(encode("")) == 0


@pytest.mark.parametrize("scale", [0.3, 0.5, 1.7, 3.0])
def test_scaled_texts_keep_their_equal_beginnings(scale: float) -> None:
    one, other = ("".join(chr(97 + at % 26) * 4 for at in range(40)) + end for end in ("a" * 80, "b" * 40))
    tokens = encode(one, scale_lengths=scale)
    assert len(tokens) == round(60 * scale)
    assert abs(shared(tokens, encode(other, scale_lengths=scale)) - 40 * scale) <= 1
    assert len(encode("a", scale_lengths=0.01)) == 1
    assert len(encode("", scale_lengths=3)) == 0


def said(*turns: tuple[str, str], who: str = "from", what: str = "value") -> list[dict[str, str]]:
    return [{who: role, what: text} for role, text in turns]


def conversations(folder: Path, *values: Any, **options: Any) -> Workload:
    return read("sharegpt", written(folder, json.dumps(list(values))), **options)


TALK = (("human", "What is it?"), ("gpt", "A cache of rows."), ("human", "And then?"), ("gpt", "It is judged."))


def test_each_answer_is_a_request_behind_all_that_was_said(tmp_path: Path) -> None:
    workload = conversations(tmp_path, {"id": "a", "conversations": said(*TALK)})
    first, second = workload.requests
    assert [first.req_id, second.req_id] == ["sharegpt-1-1", "sharegpt-1-3"]
    assert [first.after, second.after] == [None, "sharegpt-1-1"]
    assert [first.num_prompt_tokens, first.max_tokens] == [3, 4]
    assert np.array_equal(everything(first), prompt(second)[:7])
    assert second.num_prompt_tokens == 10
    assert workload.notes == (
        PSEUDO,
        "The file tells no times: conversations begin at 0, and a turn comes when the answer before it is there. "
        "A row is an answer that is asked for, or a conversation that asks for none.",
    )


def test_conversations_that_begin_alike_share_tokens(tmp_path: Path) -> None:
    other = (*TALK[:2], ("human", "And what?"), TALK[3])
    workload = conversations(tmp_path, *({"conversations": said(*turns)} for turns in (TALK, other)))
    _, second, _, fourth = workload.requests
    assert shared(prompt(second), prompt(fourth)) == 8
    assert fourth.after == "sharegpt-2-1"


def test_roles_and_contents_have_two_names(tmp_path: Path) -> None:
    roles = {"human": "user", "gpt": "assistant"}
    renamed = said(*((roles[role], text) for role, text in TALK), who="role", what="content")
    workload = conversations(tmp_path, {"conversations": said(*TALK)}, {"messages": renamed})
    for one, other in zip(workload.requests[:2], workload.requests[2:], strict=True):
        assert np.array_equal(everything(one), everything(other))


def test_what_else_is_said_is_part_of_the_prompt(tmp_path: Path) -> None:
    turns = said(("system", "Be kind."), ("gpt", "Hi."), *TALK[:2])
    (request,) = conversations(tmp_path, {"conversations": turns}).requests
    assert request.num_prompt_tokens == 2 + 1 + 3


def test_conversations_that_ask_for_nothing_are_dropped_with_their_reason(tmp_path: Path) -> None:
    values = [
        "text",
        {"id": 1},
        {"conversations": "text"},
        {"conversations": []},
        {"conversations": said(("gpt", "Hi."))},
        {"conversations": ["text"]},
        {"conversations": [{"value": "x"}]},
        {"conversations": [{"from": "human", "value": None}]},
        {"conversations": said(("human", "Hi."))},
        {"conversations": said(("human", "Hi."), ("human", "Hello?"), ("gpt", "Yes."))},
        {"conversations": said(("human", "Hi."), ("gpt", ""))},
        {"conversations": said(("human", ""), ("gpt", "Hi."))},
    ]
    workload = conversations(tmp_path, *values)
    assert [request.req_id for request in workload.requests] == ["sharegpt-10-2"]
    assert workload.ledger.dropped == {
        "no conversation": 1,
        "no conversations": 2,
        "nobody asks": 2,
        "a turn is no object": 1,
        "a turn has no from": 1,
        "a turn has no value": 1,
        "no answer": 2,
        "empty answer": 1,
        "empty prompt": 1,
    }


def test_a_limit_stops_within_a_conversation(tmp_path: Path) -> None:
    workload = conversations(tmp_path, *[{"conversations": said(*TALK)}] * 3, limit=3)
    assert [request.req_id for request in workload.requests] == ["sharegpt-1-1", "sharegpt-1-3", "sharegpt-2-1"]
    assert workload.ledger.rows == 3


SHAREGPT_LOOKS = (
    "sharegpt looks like "
    '[{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}]'
)
REFUSED = {
    b"": "f: it is not JSON (Input data was truncated); ",
    b'[{"conversations": [{"from"': "f: it is not JSON (Input data was truncated); ",
    b'{"conversations": []}': "f: it is no list of conversations; ",
    b"[]": "f: there is no row in it; ",
    b'[1, 2, {"prompt": 3}]': ("f: 0 of 3 rows are of this format (no conversation: 2, no conversations: 1); "),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.items())
def test_a_file_without_conversations_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    assert refusal("sharegpt", written(tmp_path, content)) == message + SHAREGPT_LOOKS


def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, b'[\n\n"\xff"]')
    assert refusal("sharegpt", path) == "f:3: byte 0xff is not UTF-8; save it as UTF-8"


def test_a_custom_dataset(tmp_path: Path) -> None:
    india, iran = (f"What is the capital of {country}?" for country in ("India", "Iran"))
    rows = [{"prompt": india, "output_tokens": 10}, {"prompt": iran}, {"prompt": india, "output_tokens": 10}]
    workload = read("vllm-custom", written(tmp_path, json_lines(*rows)))
    first, second, again = workload.requests
    assert [first.req_id, second.req_id] == ["vllm-custom-1", "vllm-custom-2"]
    assert [(request.num_prompt_tokens, request.max_tokens) for request in (first, second)] == [(8, 10), (7, 256)]
    assert {(request.arrival, request.after) for request in workload.requests} == {(0, None)}
    assert shared(prompt(first), prompt(second)) == 6
    assert shared(everything(first), everything(again)) == 8, "the outputs are not known"
    assert workload.notes == (
        PSEUDO,
        "The file tells no times: all requests come at 0. What they sample is their own.",
        "Requests without output_tokens: 1. Each samples 256, as vLLM does by default.",
    )


def test_a_damaged_row_of_a_custom_dataset_is_dropped_for_its_reason(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "output_tokens": None},
        "{",
        {"output_tokens": 1},
        {"prompt": ["a"]},
        {"prompt": ""},
        {"prompt": "a", "output_tokens": 0},
        {"prompt": "a", "output_tokens": "1"},
        {"prompt": "a", "output_tokens": True},
    ]
    workload = read("vllm-custom", written(tmp_path, json_lines(*rows)))
    assert workload.ledger.kept == 1
    assert workload.ledger.dropped == {
        "not JSON": 1,
        "no prompt": 1,
        "prompt is no text": 1,
        "prompt is empty": 1,
        "output_tokens is 0": 1,
        "output_tokens is no count": 2,
    }
    assert refusal("vllm-custom", written(tmp_path, json_lines({"text": "a"}))) == (
        "f: 0 of 1 rows are of this format (no prompt: 1); vllm-custom looks like "
        '{"prompt": "What is the capital of India?", "output_tokens": 10}'
    )


def test_lengths_of_texts_can_be_scaled(tmp_path: Path) -> None:
    path = written(tmp_path, json_lines({"prompt": "What is the capital of India?", "output_tokens": 10}))
    (request,) = read("vllm-custom", path, scale_lengths=0.5).requests
    assert (len(prompt(request)), request.max_tokens) == (4, 5)
    first, second = conversations(tmp_path, {"conversations": said(*TALK)}, scale_lengths=2).requests
    assert (first.num_prompt_tokens, first.max_tokens) == (6, 8)
    assert np.array_equal(everything(first), prompt(second)[:14])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="the library tokenizers is not here")
    words = {word: number for number, word in enumerate(("?", "What", "is", "it", "A", "cache"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="A $A", special_tokens=[("A", 4)])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("name", ["tokenizer.json", "."])
def test_a_tokenizer_can_be_named_by_its_file_or_its_folder(name: str, tokenizer: Path) -> None:
    path = written(tokenizer, json_lines({"prompt": "What is it is cache"}))
    workload = read("vllm-custom", path, tokenizer=str(tokenizer / name))
    assert prompt(workload.requests[0]).tolist() == [1, 2, 3, 2, 5]
    told = f"Tokens are those of {tokenizer / 'tokenizer.json'}, without a chat template"
    assert workload.notes[0] == f"{told}: the text itself and no special tokens."


def test_a_tokenizer_reads_conversations_turn_by_turn(tokenizer: Path) -> None:
    workload = conversations(tokenizer, {"conversations": said(*TALK)}, tokenizer=str(tokenizer))
    assert prompt(workload.requests[1])[:6].tolist() == [1, 2, 3, 0, 4, 5]


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the library tokenizers is not here")
    path = written(tmp_path, json_lines({"prompt": "a"}))
    looked = tmp_path / "tokenizer.json"
    with pytest.raises(Exception, match=r"tokenizer\.json: there is no such file; name a tokenizer.json, or a folder"):
        read("vllm-custom", path, tokenizer=str(tmp_path))
    looked.write_text("{}")
    with pytest.raises(Exception, match=r"tokenizer\.json: it is no tokenizer \(.*\); name a tokenizer.json of"):
        read("vllm-custom", path, tokenizer=str(looked))


def test_without_the_library_a_tokenizer_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = written(tmp_path, "{}", name="tokenizer.json")
    with pytest.raises(SetupError) as error:
        read_workload(f"vllm-custom:{path}", ReadOptions(tokenizer=str(path)))
    assert str(error.value) == "the library tokenizers is not here; pip install tokenizers, or name no tokenizer"
