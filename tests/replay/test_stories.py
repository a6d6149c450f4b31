"""Every story, under every talker: our cache gives the right rows or refuses by name, ``none`` is caught."""

from __future__ import annotations

import pytest

from omnisim.cache import errors
from omnisim.talker import Talker
from omnisim.verify import Options, Run, verify

from .stories import DEFERRED, HIDDEN, STORIES, TALKERS, Story

CASES = [
    pytest.param(story, talker, id=f"{story.name}-{talker.name}")
    for story in STORIES
    for talker in story.only or TALKERS
]


def run(story: Story, talker: Talker, **options: str) -> Run:
    return verify(story.trace(talker), Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("story", "talker"), CASES)
def test_our_cache_gives_the_right_rows_or_refuses_by_name(story: Story, talker: Talker) -> None:
    result = run(story, talker)
    if story.refusal:
        assert result.outcome == "refusal", result.first
        assert issubclass(getattr(errors, story.refusal), errors.PrefixCacheError)
        assert result.error.startswith(f"{story.refusal} ")
    elif story.divergence:
        assert result.first is not None
        assert result.first.divergence.check == story.divergence
    else:
        assert result.outcome == "agreement", (result.error, result.first)


@pytest.mark.parametrize(("story", "talker"), CASES)
def test_under_provenance_our_cache_never_diverges(story: Story, talker: Talker) -> None:
    result = run(story, talker, truth="provenance")
    assert result.outcome == ("refusal" if story.refusal else "agreement"), (result.error, result.first)


@pytest.mark.parametrize("story", [s for s in STORIES if s.has_hit], ids=lambda story: story.name)
@pytest.mark.parametrize("truth", ["content", "provenance"])
def test_a_cache_that_keeps_nothing_is_caught_at_every_hit(story: Story, truth: str) -> None:
    talker = HIDDEN if HIDDEN in (story.only or TALKERS) else DEFERRED
    result = run(story, talker, subject="none", truth=truth)
    if "K" in story.text and talker is DEFERRED:  # the key is absent where the hit's rows would be
        assert result.outcome == "agreement"
        return
    assert result.outcome == "divergence"
    assert result.first is not None
    assert {"row-count", "once-in-order"} <= result.first.divergence.failed
    assert result.tally.failed["row-count"] == result.tally.keys[result.first.divergence.key].outputs_wrong


def test_a_pad_slot_is_not_stored_and_a_hit_on_it_is_refused() -> None:
    story = Story("", "new A c=0 n=4 [1]; slots [4,5,6,-1]\nfin A; new B c=4 n=1 [1,2]")
    result = run(story, HIDDEN)
    assert result.outcome == "refusal"
    assert "NeverWritten" in result.error
    assert "slot 7" in result.error
