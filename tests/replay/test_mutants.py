"""The judge says no: each planted mutant of our cache fails the check that it was planted for."""

from __future__ import annotations

import pytest

from omnisim.checks import CHECKS
from omnisim.subjects.builtin import Builtin
from omnisim.verify import Options, verify

from ..cache.mutants import MUTANTS, Mutant
from .liars import LIARS
from .stories import STORIES, TALKERS, Story

MORE = (
    Story(
        "two groups, padded hits, pad slot",
        "new Z c=0 n=4 [9]\nfin Z; new A c=0 n=4 [1]; new D c=0 n=4 [2]; slots [4,5,6,-1,8,9,10,11]\n"
        "fin D; new B c=4 n=2 [2,3]; pad 8\nrun B c=6 n=1; new E c=4 n=2 [9,5]",
        geometry={"num_kv_cache_groups": 2, "num_blocks": 10},
    ),
    Story(
        "a key absent once",
        "new A c=0 n=4 [1]; no K\nfin A; new C c=4 n=1 [1,3]\nrun C c=5 n=1; new B c=0 n=4 [2]",
    ),
)
CORPUS = [(story, talker) for story in (*STORIES, *MORE) for talker in story.only or TALKERS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_fails_the_check_that_it_was_planted_for(mutant: Mutant) -> None:
    failed: set[str] = set()
    for story, talker in CORPUS:
        failed |= verify(story.trace(talker), Options(), Builtin(mutant.cache_class)).tally.failed.keys()
        if mutant.check in failed:
            return
    pytest.fail(f"{mutant.name} ({mutant.situation}) fails {sorted(failed)}, not {mutant.check}")


def test_every_check_has_a_mutant_that_fails_it() -> None:
    assert {mutant.check for mutant in MUTANTS} | {liar.check for liar in LIARS} == set(CHECKS)


def test_the_original_fails_no_check_on_the_same_corpus() -> None:
    for story, talker in CORPUS:
        result = verify(story.trace(talker), Options(truth="provenance"))
        assert not result.tally.failed, (story.name, talker.name, result.first)
