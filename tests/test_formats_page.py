"""docs/formats.md: its examples run, and its tables leave nothing out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from omnisim.report.model import run_data
from omnisim.talker import Kind
from omnisim.talkers import load_talker
from omnisim.trace import Header, StepRecord, load
from omnisim.verify import Options, verify

PAGE = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()
HELLO = Path(__file__).parents[1] / "traces" / "hello.yaml"
EXAMPLES = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def first_column(heading: str) -> set[str]:
    """Names in the first column of the table with this heading."""
    table = PAGE[PAGE.index(f"| {heading} |") :].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", line.split("|")[1])}


@pytest.mark.parametrize("example", [text for kind, text in EXAMPLES if kind == "yaml"])
def test_each_yaml_example_is_a_trace_that_agrees_or_a_talker(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(example)
    if "omnisim-talker" in example:
        run = verify(load(HELLO), Options(talker=str(path)))
    else:
        run = verify(load(path), Options())
    assert run.outcome == "agreement", run


def test_the_python_example_prints_an_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = [text for kind, text in EXAMPLES if kind == "python"]
    exec(code, {})  # noqa: S102 - the page's own example
    assert capsys.readouterr().out == (
        "agreement: mine.jsonl, subject builtin, talker hidden-only: 0 of 2 outputs wrong\n"
    )


def test_the_tables_have_every_field_and_every_kind() -> None:
    assert first_column("header field") == set(Header.__struct_fields__)
    assert first_column("record field") == set(StepRecord.__struct_fields__)
    assert first_column("kind") == set(get_args(Kind))


def test_the_table_of_the_report_has_every_field_of_a_run() -> None:
    assert first_column("field") == set(run_data(verify(load(HELLO), Options())))


def test_a_talker_named_by_its_path_is_looked_for_beside_the_trace(tmp_path: Path) -> None:
    (talker,) = [text for kind, text in EXAMPLES if "omnisim-talker" in text]
    (tmp_path / "mine.yaml").write_text(talker)
    trace = tmp_path / "trace.yaml"
    trace.write_text(HELLO.read_text().replace("talker: hidden-only", "talker: mine.yaml"))
    assert verify(load(trace), Options()).talker == load_talker(str(tmp_path / "mine.yaml")).name
