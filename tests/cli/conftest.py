"""The command line, called in process."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from omnisim.cli import main


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The report of ``--json -``."""
        value: dict[str, Any] = json.loads(self.out)
        return value


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(*words)``: ``omnisim`` with these words, as in a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(logging, "lastResort", None)

    def call(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["omnisim", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code or 0
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, bytes | str], Path]:
    """``written(name, content)``: a file of this content."""

    def write(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write
