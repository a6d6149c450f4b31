"""Equal blocks have equal tokens, whatever the block size of whoever reads them; nothing else has."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisim.importers.block_tokens import BlockTokens
from omnisim.importers.identity import Kind, identities, own_tokens

from .files import shared


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


prompts = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 512))


@given(one=prompts, other=prompts)
def test_a_block_of_512_can_be_cut_into_blocks_of_16(one: tuple[list[int], int], other: tuple[list[int], int]) -> None:
    blocks = BlockTokens(512)
    made, known = [], []
    for numbers, last in (one, other):
        made.append(blocks.tokens(ids(*numbers), (len(numbers) - 1) * 512 + last))
        known.append([(number, 512) for number in numbers[:-1]] + [(numbers[-1], last)])
    same = next((at for at, pair in enumerate(zip(*known, strict=False)) if pair[0] != pair[1]), min(map(len, known)))
    num_tokens = sum(length for _, length in known[0][:same])
    assert shared(*made) // 16 == num_tokens // 16
    assert shared(*made) >= num_tokens


def test_no_sixteen_tokens_of_different_blocks_are_equal() -> None:
    tokens = BlockTokens(512).tokens(ids(*range(200)), 200 * 512)
    assert len(np.unique(tokens.reshape(-1, 16), axis=0)) == 200 * 32


def test_a_partial_block_is_not_how_a_longer_one_begins() -> None:
    blocks = BlockTokens(512)
    made = [blocks.tokens(ids(7), length) for length in range(16, 513, 31)]
    assert max(shared(one, other) for one, other in combinations(made, 2)) < 3
    assert np.array_equal(blocks.tokens(ids(7), 47), made[1])


def test_kinds_and_lengths_are_apart() -> None:
    numbers = np.arange(0, 2**49, 2**39, dtype=np.int64)
    names = [identities(kind, numbers, length) for kind in Kind for length in (0, 1, 15, 16, 511, 512, 999)]
    assert len(np.unique(np.concatenate(names))) == len(Kind) * 7 * len(numbers)
    assert shared(own_tokens(Kind.PROMPT, 3, 0, 50), own_tokens(Kind.OUTPUT, 3, 0, 50)) < 3
    assert shared(own_tokens(Kind.PROMPT, 3, 0, 50), own_tokens(Kind.PROMPT, 4, 0, 50)) < 3
    assert np.array_equal(own_tokens(Kind.PROMPT, 3, 0, 50)[20:], own_tokens(Kind.PROMPT, 3, 20, 50))


def test_the_gaps_between_kinds_and_lengths_are_as_wide_as_they_are_said_to_be() -> None:
    names = np.sort(np.concatenate([identities(kind, ids(0), length) for kind in Kind for length in range(1000)]))
    assert int(np.diff(names).min()) >= 2**49
    assert 2**64 - int(names[-1]) + int(names[0]) >= 2**49


@pytest.mark.parametrize(
    ("scale", "length", "scaled"),
    [(1.0, 1030, 1030), (0.5, 1030, 515), (0.1, 1030, 103), (0.001, 1030, 3), (2.0, 1025, 2050), (0.5, 1535, 768)],
)
def test_a_scaled_block_stays_a_block(scale: float, length: int, scaled: int) -> None:
    blocks = BlockTokens(512, scale)
    tokens = blocks.tokens(ids(4, 5, 6), length)
    assert len(tokens) == blocks.scaled(length) == scaled
    assert shared(tokens, blocks.tokens(ids(4, 5), 1024)) == blocks.scaled(1024)


def test_a_partial_block_that_is_scaled_to_a_full_one_is_still_not_it() -> None:
    blocks = BlockTokens(512, 0.25)
    assert blocks.scaled(511) == blocks.scaled(512) == 128
    assert shared(blocks.tokens(ids(1), 511), blocks.tokens(ids(1), 512)) < 3


def test_what_completes_a_partial_block_begins_with_it() -> None:
    blocks = BlockTokens(16)
    before = blocks.tokens(ids(9), 16)
    blocks.complete((1, 10), (9, 16))
    blocks.complete((1, 10), (8, 16))
    blocks.complete((2, 13), (9, 16))
    tail, longer, full, other = (
        blocks.tokens(ids(number), num) for number, num in ((1, 10), (2, 13), (9, 16), (8, 16))
    )
    assert shared(tail, full) == shared(tail, other) == shared(tail, longer) == 10
    assert shared(longer, full) == 13
    assert shared(full, other) == 10
    assert np.array_equal(full[13:], before[13:]), "the rest is its own"
    assert shared(blocks.tokens(ids(1), 11), tail) < 3, "another length is another block"


starts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15), st.integers(4, 7)), max_size=6)


@given(starts)
def test_blocks_begin_with_their_partial_blocks_in_whatever_order_that_is_told(
    told: list[tuple[int, int, int]],
) -> None:
    forth, back = BlockTokens(16), BlockTokens(16)
    for blocks, order in ((forth, told), (back, told[::-1])):
        for tail, length, full in order:
            blocks.complete((tail, length), (full, 16))
    for tail, length, full in told:
        assert shared(forth.tokens(ids(tail), length), forth.tokens(ids(full), 16)) == length
        assert np.array_equal(forth.tokens(ids(3, full), 32), back.tokens(ids(3, full), 32))


def test_the_tokens_behind_a_position() -> None:
    blocks = BlockTokens(16)
    tokens = blocks.tokens(ids(1, 2, 3), 45)
    assert np.array_equal(blocks.tokens_behind(ids(2, 3), 20, 45), tokens[20:])
    assert np.array_equal(blocks.tokens_behind(ids(2, 3), 16, 45), tokens[16:])
