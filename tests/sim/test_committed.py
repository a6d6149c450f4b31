"""traces/simulated: each trace agrees under every talker, and can be made again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from omnisim.talkers import talker_names
from omnisim.trace import load
from omnisim.verify import Options, verify

from ..cli.conftest import Run
from ..cli.conftest import run as run  # the fixture

FOLDER = Path(__file__).parents[2] / "traces" / "simulated"
TRACES = sorted(FOLDER.glob("*.jsonl.zst"))


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


def test_the_readme_tells_of_each() -> None:
    told = re.findall(r"^\| ([\w-]+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted([*map(name_of, TRACES), "trace"])


@pytest.mark.parametrize("path", TRACES, ids=name_of)
def test_our_cache_agrees_under_every_talker(path: Path) -> None:
    for talker in talker_names():
        result = verify(load(path), Options(talker=talker))
        assert result.outcome == "agreement", result
    assert verify(load(path), Options(subject="none")).outcome == "divergence"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("path", TRACES, ids=name_of)
def test_each_is_made_again_by_the_command_that_it_tells(run: Run, path: Path, tmp_path: Path) -> None:
    header = load(path).header
    omnisim, *words = shlex.split(header.provenance)
    assert (omnisim, words[:2]) == ("omnisim", ["simulate", name_of(path)])
    again = tmp_path / path.name
    assert run(*words, "-o", again).code == 0
    made = load(again)
    if made.header.producer.version.partition("vllm ")[2] != header.producer.version.partition("vllm ")[2]:
        pytest.skip(f"it was made with {header.producer.version}, and this is another vLLM")
    assert list(made.records()) == list(load(path).records())
    assert made.header.cache == header.cache
    if made.header == header:
        assert again.read_bytes() == path.read_bytes()
