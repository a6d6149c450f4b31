"""Help is help: every command has examples that work, every option says what it does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from omnisim.cli import app
from omnisim.subjects import store
from omnisim.verify import Options

from ..releases import release
from .conftest import Run
from .files import ROOT

GROUP = typer.main.get_command(app)


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command, by its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


COMMANDS = dict(commands(GROUP))


def test_the_commands_are_these() -> None:
    assert sorted(COMMANDS) == [
        "bench",
        "bisect",
        "check",
        "compare",
        "convert",
        "coverage",
        "replay",
        "show",
        "simulate",
        "subjects install",
        "subjects list",
        "subjects path",
        "subjects remove",
    ]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command_and_the_exit_codes(run: Run, words: list[str]) -> None:
    done = run(*words)
    assert (done.code, done.err) == (0, "")
    assert "Usage: omnisim [OPTIONS] COMMAND" in done.out
    assert "Exit codes: 0 all agree, 1 " in done.out
    for name in (
        *(name.partition(" ")[0] for name in COMMANDS),
        "--version",
        "--install-completion",
        "--show-completion",
    ):
        assert name in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_and_every_option_is_explained(run: Run, name: str) -> None:
    done = run(*name.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert f"Usage: omnisim {name} " in done.out
    assert "Examples:" in done.out
    assert f"omnisim {name}" in done.out.partition("Examples:")[2]
    for parameter in COMMANDS[name].params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


def test_every_option_of_a_replay_can_be_given_on_the_command_line() -> None:
    names = {parameter.name for parameter in COMMANDS["replay"].params}
    assert set(Options.__dataclass_fields__) <= names


def examples() -> list[str]:
    return [line for command in COMMANDS.values() for line in re.findall(r"- `(.+?)`", command.callback.__doc__)]


NOT_HERE = ("omnisim bench", "omnisim subjects install", "omnisim subjects remove")
"""Examples that measure, ask the network, or change what the other tests need; they have tests of their own."""


@pytest.mark.parametrize("example", [line for line in examples() if not line.startswith(NOT_HERE)])
def test_the_examples_work(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, example: str) -> None:
    program, *words = shlex.split(example)
    assert program == "omnisim"
    if re.search(r"0\.\d\d\.0|path:|--all|--expect", example):
        folders = [Path(store.folder(release(version))) for version in store.RELEASES]
        for name, folder in zip(("old", "between", "new"), (folders[0], folders[2], folders[-1]), strict=True):
            (tmp_path / name).symlink_to(folder)
    if {"trace.yaml", "capture.jsonl.zst"} & set(words):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "trace.yaml").write_text((ROOT / "traces" / "hello.yaml").read_text())
        run("convert", "trace.yaml", "capture.jsonl.zst")
    else:
        monkeypatch.chdir(ROOT)
    done = run(*words)
    shows_a_difference = words[0] == "compare" or "none" in words[2:]
    assert done.code == (1 if shows_a_difference and words[0] != "convert" else 0), done


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_for_a_shell(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_OMNISIM_COMPLETE", f"source_{shell}")
    done = run()
    assert done.code == 0
    assert "_OMNISIM_COMPLETE" in done.out


def test_completion_completes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_OMNISIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "omnisim replay --sub")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert run().out.split() == ["--subject"]
    monkeypatch.setenv("COMP_WORDS", "omnisim replay --talker th")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert run().out.split() == ["thinker"]


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom omnisim.cli import main\nsys.argv = ['omnisim', 'replay', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit(','.join({'torch', 'numpy', 'vllm', 'yaml', 'msgspec'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
