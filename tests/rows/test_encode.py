"""A row spells its name, exactly in its dtype, and is never taken for padding or for fresh storage."""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from omnisim.rows.encode import NARROW, classify, encode, identity_bits, key_salt, padding_like, torch_dtype
from omnisim.talker import Dtype

DTYPES = [torch_dtype(name) for name in get_args(Dtype)]
SALT = key_salt("codes.audio")
WIDE = (2, 40)
"""It carries all 64 bits in every dtype."""

a_name = st.integers(1, 2**64 - 1)
a_shape = st.lists(st.integers(1, 9), max_size=3).map(tuple)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=get_args(Dtype))


def rows(*names: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = SALT) -> Tensor:
    return encode(np.array(names, dtype=np.uint64), salt, shape, dtype)


@every_dtype
@given(name=a_name, salt=st.integers(0, 2**64 - 1), shape=a_shape)
def test_a_row_that_carries_64_bits_gives_its_name_back(
    dtype: torch.dtype, name: int, salt: int, shape: tuple[int, ...]
) -> None:
    (row,) = rows(name, shape=shape, dtype=dtype, salt=salt)
    told = name if identity_bits(shape, dtype) == 64 else None
    assert row.shape == shape
    assert row.dtype is dtype
    assert classify(row, salt) == ("row", told)


@every_dtype
@given(name=a_name, shape=a_shape)
def test_no_element_is_zero_and_no_row_looks_like_padding_or_fresh_storage(
    dtype: torch.dtype, name: int, shape: tuple[int, ...]
) -> None:
    (row,) = rows(name, shape=shape, dtype=dtype)
    padding = row.clone()
    padding_like(padding)
    values = row.to(torch.float64).flatten()
    assert bool((values[:1] if dtype is torch.bool else values).all())
    assert not torch.equal(row.to(torch.float64), padding.to(torch.float64))


@every_dtype
@given(names=st.lists(a_name, min_size=2, max_size=6, unique=True))
def test_different_names_give_different_rows(dtype: torch.dtype, names: list[int]) -> None:
    pairs = combinations(rows(*names, shape=WIDE, dtype=dtype).to(torch.float64), 2)
    assert not any(torch.equal(one, other) for one, other in pairs)


@every_dtype
@given(name=a_name)
def test_the_same_name_under_another_key_is_another_row_and_is_not_taken_for_ours(
    dtype: torch.dtype, name: int
) -> None:
    (row,) = rows(name, shape=WIDE, dtype=dtype)
    (other,) = rows(name, shape=WIDE, dtype=dtype, salt=key_salt("codes.ref"))
    assert not torch.equal(row.to(torch.float64), other.to(torch.float64))
    assert classify(other, SALT)[1] != name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float32], ids=str)
def test_every_column_depends_on_the_name_and_no_two_columns_are_alike(dtype: torch.dtype) -> None:
    table = rows(*range(1, 65), shape=(300,), dtype=dtype).to(torch.float64)
    columns = [tuple(column.tolist()) for column in table.T]
    assert min(len(set(column)) for column in columns) > 32
    assert len(set(columns)) == 300


@every_dtype
def test_one_element_that_is_changed_makes_a_row_another(dtype: torch.dtype) -> None:
    (row,) = rows(77, shape=(200,), dtype=dtype)
    for at in (1, 70, 199):
        damaged = row.clone()
        damaged[at] = not bool(row[at]) if dtype is torch.bool else (2 if float(row[at]) == 1 else 1)
        assert classify(damaged, SALT)[1] != 77


@every_dtype
def test_padding_and_fresh_storage_are_told_from_rows(dtype: torch.dtype) -> None:
    row = torch.zeros(WIDE, dtype=dtype)
    assert classify(row, SALT) == ("never-written", None)
    padding_like(row)
    assert classify(row, SALT) == ("never-written" if dtype is torch.bool else "padding", None)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point], ids=str)
def test_nan_everywhere_is_fresh_storage_and_nan_somewhere_is_no_row(dtype: torch.dtype) -> None:
    assert classify(torch.full((40,), float("nan")).to(dtype), SALT) == ("never-written", None)
    (row,) = rows(5, shape=(40,), dtype=torch.float32)
    row[39] = float("nan")
    assert classify(row.to(dtype), SALT) == ("other", None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8], ids=str)
def test_poisoned_integers_are_fresh_storage(dtype: torch.dtype) -> None:
    assert classify(torch.full((16,), torch.iinfo(dtype).min, dtype=dtype), SALT) == ("never-written", None)


def test_a_narrow_row_of_booleans_starts_with_true_or_is_not_ours() -> None:
    assert classify(torch.tensor([True, False, True]), SALT) == ("row", None)
    assert classify(torch.tensor([False, False, True]), SALT) == ("other", None)


def test_a_value_that_no_row_holds_is_other() -> None:
    assert classify(torch.full((64,), 0.5), SALT) == ("other", None)
    assert classify(torch.full((64,), 2**40), SALT) == ("other", None)
    assert classify(torch.full((64,), 3, dtype=torch.int64), SALT) == ("other", None)
    assert classify(torch.empty(0), SALT) == ("other", None)


@every_dtype
@pytest.mark.parametrize("shape", [(), (1,), (4, 16)], ids=str)
def test_no_names_give_no_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert rows(shape=shape, dtype=dtype).shape == (0, *shape)


@every_dtype
def test_rows_are_contiguous(dtype: torch.dtype) -> None:
    assert rows(1, 2, 3, shape=(3, 5), dtype=dtype).is_contiguous()


@pytest.mark.parametrize(
    ("shape", "dtype", "bits"),
    [
        ((1,), torch.int64, 32),
        ((16,), torch.int64, 64),
        ((3,), torch.int32, 48),
        ((1,), torch.bfloat16, 8),
        ((3,), torch.uint8, 12),
        ((3,), torch.float8_e5m2, 6),
        ((3,), torch.bool, 2),
        ((), torch.bool, 0),
    ],
    ids=str,
)
def test_a_narrow_row_says_how_many_bits_it_carries(shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> None:
    assert identity_bits(shape, dtype) == bits
    many = rows(*range(1, 2000), shape=shape, dtype=dtype).reshape(1999, prod(shape)).to(torch.float64)
    assert len({tuple(row.tolist()) for row in many}) <= 2**bits


def test_32_bits_are_enough_not_to_be_called_narrow() -> None:
    assert identity_bits((1,), torch.int64) == NARROW


def test_a_salt_is_the_same_in_every_process() -> None:
    assert key_salt("hidden_states") == 0x818B71F7E1FCCB9D
