"""Conversations in the form of ShareGPT: a JSON list, each with its turns in order, without times.

``{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}``; ``messages``,
``role`` and ``content`` are read too. vllm/benchmarks/datasets/datasets.py (0.32), ShareGPTDataset, takes the first
two turns of each; here every answer is a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from omnisim.errors import FileError
from omnisim.importers.lines import decoded, readable
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import DamagedRow, Format, keep, refuse_if_empty
from omnisim.importers.texts import encoder
from omnisim.workload import TokenIds, Workload, WorkloadRequest

__all__ = ["read"]

_FORMAT = Format(
    "sharegpt",
    '[{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}]',
)
_ASKS = frozenset({"human", "user"})
_ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "bard", "bing"})
_NO_TIMES = (
    "The file tells no times: conversations begin at 0, and a turn comes when the answer before it is there. "
    "A row is an answer that is asked for, or a conversation that asks for none."
)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    who: str
    tokens: TokenIds


def read(path: Path, options: ReadOptions) -> Workload:
    """The workload of conversations; FileError if the file holds none."""
    text = encoder(options)
    attempts = (
        attempt
        for number, value in enumerate(_conversations(path), start=1)
        for attempt in _attempts(number, value, text.encode)
    )
    requests, ledger = keep(attempts, options.limit)
    refuse_if_empty(path, ledger, _FORMAT)
    return Workload(tuple(requests), ledger, (text.note, _NO_TIMES))


def _conversations(path: Path) -> list[Any]:
    with readable(path):
        content = decoded(path.read_bytes(), path)
    try:
        value = msgspec.json.decode(content.removeprefix("\ufeff"))
    except (msgspec.DecodeError, RecursionError) as error:
        raise FileError(str(path), f"it is not JSON ({error})", _FORMAT.remedy) from None
    if not isinstance(value, list):
        raise FileError(str(path), "it is no list of conversations", _FORMAT.remedy)
    return value


def _attempts(
    number: int, conversation: Any, encode: Callable[[str], TokenIds]
) -> Iterator[WorkloadRequest | DamagedRow]:
    try:
        turns = [_turn(value, encode) for value in _turn_list(conversation)]
    except DamagedRow as damage:
        yield damage
        return
    asking = [at for at, turn in enumerate(turns) if turn.who in _ASKS]
    if not asking:
        yield DamagedRow("nobody asks")
    after = None
    for at in asking:
        attempt = _attempt(f"sharegpt-{number}-{at + 1}", turns[: at + 1], turns[at + 1 : at + 2], after)
        if isinstance(attempt, WorkloadRequest):
            after = attempt.req_id
        yield attempt


def _attempt(
    req_id: str, said: Sequence[_Turn], next_turn: Sequence[_Turn], after: str | None
) -> WorkloadRequest | DamagedRow:
    num_prompt_tokens = sum(len(turn.tokens) for turn in said)
    if not next_turn or next_turn[0].who not in _ANSWERS:
        return DamagedRow("no answer")
    answer = next_turn[0].tokens
    if not num_prompt_tokens or not len(answer):
        return DamagedRow("empty answer" if num_prompt_tokens else "empty prompt")
    return WorkloadRequest(
        req_id=req_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=len(answer),
        prompt_token_ids=partial(_joined, said),
        sampled_token_ids=lambda: answer,
        after=after,
    )


def _joined(said: Sequence[_Turn]) -> TokenIds:
    return np.concatenate([turn.tokens for turn in said])


def _turn_list(conversation: Any) -> list[Any]:
    if not isinstance(conversation, dict):
        raise DamagedRow("no conversation")
    turns = conversation.get("conversations", conversation.get("messages"))
    if not isinstance(turns, list):
        raise DamagedRow("no conversations")
    return turns


def _turn(value: Any, encode: Callable[[str], TokenIds]) -> _Turn:
    if not isinstance(value, dict):
        raise DamagedRow("a turn is no object")
    who, text = value.get("from", value.get("role")), value.get("value", value.get("content"))
    if not isinstance(who, str) or not isinstance(text, str):
        raise DamagedRow(f"a turn has no {'value' if isinstance(who, str) else 'from'}")
    return _Turn(who, encode(text))
