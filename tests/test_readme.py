"""The README is a promise: what it shows is what happens."""

from __future__ import annotations

import re

import pytest

from omnisim.subjects.store import RELEASES
from omnisim.talkers import talker_names

from .readme import README, ROOT, SVG, filled, svg
from .releases import release

COMMANDS = ["bench", "bisect", "check", "compare", "convert", "coverage", "replay", "show", "simulate", "subjects"]


@pytest.mark.usefixtures("vllm")
def test_every_output_in_the_readme_is_what_the_program_prints() -> None:
    for version in RELEASES:
        release(version)
    text = README.read_text()
    assert filled(text) == text, "python -m tests.readme writes it anew"


def test_the_picture_shows_what_the_program_prints() -> None:
    assert SVG.read_text() == svg(), "python -m tests.readme draws it anew"


def test_every_talker_and_every_command_stands_in_the_readme() -> None:
    text = README.read_text()
    assert all(f"`{name}`" in text for name in talker_names())
    commands = re.findall(r"^    omnisim (\w+) ", text, flags=re.MULTILINE)
    assert sorted(commands) == COMMANDS


def test_nobody_is_told_to_install_what_belongs_to_somebody_else() -> None:
    for page in ROOT.glob("*.md"):
        assert not re.search(r"pip install (-\S+ )*omnisim\b", page.read_text())


def test_each_file_that_a_page_names_is_there() -> None:
    for page in ROOT.glob("*.md"):
        for name in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
            assert (ROOT / name).exists(), (page.name, name)


def test_the_story_in_the_readme_is_the_schedule_of_hello() -> None:
    from omnisim.trace import load
    from omnisim.trace.story import parse_story

    story = re.search(r"story: \|\n((?:  .*\n)+)", README.read_text())
    assert story is not None
    told = parse_story(story[1])
    written = list(load(ROOT / "traces" / "hello.yaml").records())
    for one, other in zip(told, written, strict=True):
        assert set(one.req_ids) == set(other.req_ids)  # type: ignore[arg-type]
        assert one.num_scheduled_tokens[-1] == other.num_scheduled_tokens[-1]
