"""Small files of foreign formats, and how tests look at what is read from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnisim.errors import FileError
from omnisim.importers import ReadOptions, read_workload
from omnisim.workload import TokenIds, Workload, WorkloadRequest

SAMPLES = Path(__file__).parents[2].parent / "shared" / "data" / "traces-public"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"{SAMPLES} is not there: no public samples")


def written(folder: Path, content: str | bytes, name: str = "f") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def json_lines(*rows: Any) -> str:
    """Each row as a line; text stays as it is."""
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def block_row(ids: Sequence[Any], length: Any, **more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": length, "output_length": 5, "hash_ids": list(ids), **more}


def read(form: str, path: Path, **options: Any) -> Workload:
    """A workload, after a look at what is true of every one."""
    workload = read_workload(f"{form}:{path}", ReadOptions(**options))
    ledger, requests = workload.ledger, workload.requests
    assert ledger.rows == ledger.kept + ledger.dropped.total()
    assert ledger.kept == len(requests) == len({request.req_id for request in requests}) > 0
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    assert requests[0].arrival == 0
    return workload


def refusal(form: str, path: Path, **options: Any) -> str:
    """What a file is refused with, in one line that begins with its place; the folder is left out."""
    with pytest.raises(FileError) as error:
        read_workload(f"{form}:{path}", ReadOptions(**options))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(f"{path.parent}/")


def prompt(request: WorkloadRequest) -> TokenIds:
    tokens = request.prompt_token_ids()
    assert tokens.dtype == np.int32
    assert len(tokens) == request.num_prompt_tokens
    return tokens


def everything(request: WorkloadRequest) -> TokenIds:
    """Prompt and output."""
    sampled = request.sampled_token_ids()
    assert sampled.dtype == np.int32
    assert len(sampled) == request.max_tokens > 0
    return np.concatenate([prompt(request), sampled])


def shared(one: TokenIds, other: TokenIds) -> int:
    """How many leading tokens are equal."""
    differs = np.flatnonzero(one[: len(other)] != other[: len(one)])
    return int(differs[0]) if len(differs) else min(len(one), len(other))


def chain(tokens: TokenIds, block_size: int) -> list[bytes]:
    """A name for each prefix that ends with a block, or with the partial one at the end."""
    names, before = [], b""
    for start in range(0, len(tokens), block_size):
        before = hashlib.blake2b(before + tokens[start : start + block_size].tobytes(), digest_size=16).digest()
        names.append(before)
    return names


def reuse(requests: Sequence[WorkloadRequest], block_size: int) -> tuple[int, int, int]:
    """Blocks of all prompts, those found in an unbounded cache of what came before, and prompts found whole."""
    cached: set[bytes] = set()
    num_blocks = num_hits = num_whole = 0
    for request in requests:
        names = chain(prompt(request), block_size)
        hits = next((at for at, name in enumerate(names) if name not in cached), len(names))
        num_blocks, num_hits, num_whole = num_blocks + len(names), num_hits + hits, num_whole + (hits == len(names))
        cached |= {*names, *chain(everything(request), block_size)}
    return num_blocks, num_hits, num_whole
