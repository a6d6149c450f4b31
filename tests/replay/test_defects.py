"""The traces of ``traces/defects``: each says where it comes from and what comes of it, and that comes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from omnisim.errors import OmnisimError
from omnisim.talker import Talker
from omnisim.trace import load
from omnisim.verify import Options, verify
from tests.defects import FOLDER, PAGE, SUBJECTS, page, paths

SOURCE = r"(vllm-project/vllm(-omni)?#\d+|[Ff]ound by running the releases' cache class)"
PROVENANCE = re.compile(rf"{SOURCE}([,;] {SOURCE})*\. Apache-2\.0\.")

each_trace = pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)


@each_trace
def test_each_trace_says_what_happens_where_it_comes_from_and_what_comes_of_it(path: Path) -> None:
    header = load(path).header
    comment = path.read_text().partition("\n\n")[0].splitlines()
    assert 1 <= len(comment) <= 4
    assert all(line.startswith("# ") for line in comment)
    assert PROVENANCE.fullmatch(header.provenance)
    assert tuple(header.expect) == SUBJECTS
    assert isinstance(header.talker, Talker)


def outcome_of(path: Path, subject: str) -> tuple[str, str]:
    """The outcome of a replay, and in words why."""
    try:
        run = verify(load(path), Options(subject=subject))
    except OmnisimError as error:
        return "unusable", str(error)
    return run.outcome, str(run)


@each_trace
@pytest.mark.parametrize("subject", ["builtin", "none"])
def test_what_is_expected_of_a_trace_comes_of_it(path: Path, subject: str) -> None:
    outcome, words = outcome_of(path, subject)
    assert outcome == load(path).header.expect[subject], words


def test_a_filled_row_in_the_place_of_a_blank_one_is_seen() -> None:
    from omnisim.cache import OmniTensorPrefixCache
    from omnisim.subjects.builtin import Builtin

    class Mine(OmniTensorPrefixCache):
        def get_merged_multimodal_states(self, *args: Any, **kwargs: Any) -> Any:
            merged = super().get_merged_multimodal_states(*args, **kwargs)
            return {key: {req_id: rows[[-1] * len(rows)] for req_id, rows in v.items()} for key, v in merged.items()}

    run = verify(load(FOLDER / "rows-of-which-the-last-is-filled.yaml"), Options(), subject=Builtin(Mine))
    assert (run.outcome, run.tally.keys["latents"].rows_wrong) == ("divergence", 9), run


def test_the_page_has_every_trace_with_its_outcomes() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.defects"
