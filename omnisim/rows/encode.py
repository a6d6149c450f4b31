"""Rows that name their owner: a row spells its name in its elements, exactly in the key's dtype.

An element is a digit plus one, so that it is never zero. The digits of the first elements are those of one 64-bit word
from which the name can be read back; further elements are digits of further words, so that every column depends on the
name and no two columns are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnisim.rows.naming import NameArray, mix, unmix
from omnisim.talker import Dtype

__all__ = [
    "BLANK",
    "NARROW",
    "RowKind",
    "classify",
    "encode",
    "identity_bits",
    "key_salt",
    "padding_like",
    "torch_dtype",
]

RowKind = Literal["row", "padding", "never-written", "other"]

BLANK = np.uint64(0)
"""The name of a row of zeros; no other row has it, but once in 2**64."""
NARROW = 32
"""Below so many bits of identity a row passes for another too often to be left unsaid."""

# Bits an element carries: what every integer of 1 .. 2**bits is exact in. float8_e5m2 has 3 significant bits, so 2.
_DIGIT_BITS: dict[torch.dtype, int] = {
    torch.float64: 32, torch.int64: 32,
    torch.float32: 16, torch.int32: 16,
    torch.float16: 8, torch.bfloat16: 8, torch.int16: 8,
    torch.int8: 4, torch.uint8: 4, torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 2,
    torch.bool: 1,
}  # fmt: skip

_PADDING = -7  # exact in every signed dtype, and no digit plus one
_UNSIGNED_PADDING = 255


def torch_dtype(name: Dtype) -> torch.dtype:
    """The torch dtype of a talker's dtype."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def key_salt(key: str) -> int:
    """A number that tells the rows of one key from those of another."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def identity_bits(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bits of its name that a row of this form carries, at most 64."""
    num_digits = prod(shape) - (1 if dtype is torch.bool else 0)
    return min(64, max(0, num_digits) * _DIGIT_BITS[dtype])


def encode(names_T: NameArray, salt: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The rows with these names: ``[T, *shape]``. A row of booleans starts with True, so that it is never all False."""
    bits = _DIGIT_BITS[dtype]
    num_digits = prod(shape) - (1 if dtype is torch.bool else 0)
    words = _words(mix(names_T ^ np.uint64(salt)), max(1, -(-num_digits * bits // 64)))
    return _elements(_digits(words, bits)[:, :num_digits], dtype).reshape(len(names_T), *shape)


def _words(first_T: NameArray, num_words: int) -> NameArray:
    """``[T, num_words]``: the word itself, then words made of it, which need not be read back and so may be cheap."""
    words: NameArray = first_T[:, None] * _odds(num_words)
    words[:, 1:] ^= words[:, 1:] >> np.uint64(32)  # low bits of a product know low bits only
    return words


@lru_cache
def _odds(num_words: int) -> NameArray:
    odds = mix(np.arange(1, num_words + 1, dtype=np.uint64)) | np.uint64(1)
    odds[0] = 1
    return odds


def _digits(words: NameArray, bits: int) -> NDArray[np.unsignedinteger]:
    """``[T, words]`` as ``[T, words * 64 / bits]``, the lowest bits first."""
    if bits >= 8:
        return words.view(np.dtype(f"u{bits // 8}"))
    octets = words.view(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((octets[:, :, None] >> shifts) & np.uint8(2**bits - 1)).reshape(len(words), words.shape[1] * 64 // bits)


def _elements(digits: NDArray[np.unsignedinteger], dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        first = np.ones((len(digits), 1), dtype=np.bool_)
        return torch.from_numpy(np.concatenate([first, digits.astype(np.bool_)], axis=1))
    addable = torch.int16 if dtype.itemsize == 1 else dtype  # torch cannot add in float8
    return torch.from_numpy(digits).to(addable).add_(1).to(dtype).contiguous()


def padding_like(rows: Tensor) -> None:
    """Fill ``rows`` with what no row of ours and no fresh storage holds (booleans have no such value: False)."""
    rows.fill_({torch.uint8: _UNSIGNED_PADDING, torch.bool: 0}.get(rows.dtype, _PADDING))


def classify(row: Tensor, salt: int) -> tuple[RowKind, int | None]:
    """What one row is: one of ours (with its name where it carries all 64 bits), padding, fresh storage, or other.

    A row that carries fewer passes for one of ours if it is of the form; booleans have no padding but fresh storage.
    """
    flat = row.detach().cpu().reshape(-1)
    if flat.numel() == 0:
        return "other", None
    padding = torch.empty_like(flat)
    padding_like(padding)
    if flat.dtype is not torch.bool and torch.equal(flat, padding):
        return "padding", None
    if _is_fresh(flat):
        return "never-written", None
    digits = _digits_of(flat)
    if digits is None:
        return "other", None
    if len(digits) * _DIGIT_BITS[flat.dtype] < 64:
        return "row", None
    name = _decode(flat, digits, salt)
    return ("other", None) if name is None else ("row", name)


def _is_fresh(flat: Tensor) -> bool:
    """Zeros, or what storage that is born poisoned holds."""
    if not torch.any(flat.to(torch.float32) != 0):
        return True
    if flat.dtype.is_floating_point:
        return bool(torch.isnan(flat.to(torch.float32)).all())
    return flat.dtype is not torch.bool and bool((flat == torch.iinfo(flat.dtype).min).all())


def _digits_of(flat: Tensor) -> Tensor | None:
    """The digits (int64) that a row spells, None if some element is no digit plus one."""
    wide = flat.to(torch.float64)
    digits = wide.to(torch.int64) - 1
    if flat.dtype is torch.bool:
        return digits[1:] + 1 if flat[0] else None
    in_range = (digits >= 0) & (digits < 2 ** _DIGIT_BITS[flat.dtype])
    return digits if bool((in_range & (digits + 1 == wide)).all()) else None


def _decode(flat: Tensor, digits: Tensor, salt: int) -> int | None:
    """The name in the first 64 bits, if all further elements are those that belong to it."""
    bits = _DIGIT_BITS[flat.dtype]
    word = sum(digit << (bits * place) for place, digit in enumerate(digits[: 64 // bits].tolist()))
    name = unmix(np.array([word], dtype=np.uint64)) ^ np.uint64(salt)
    same = torch.equal(encode(name, salt, flat.shape, flat.dtype)[0].to(torch.float64), flat.to(torch.float64))
    return int(name[0]) if same else None
