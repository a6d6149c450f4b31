"""What a model says about its outputs, so that the cache need not guess from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Union

__all__ = ["DEFAULT_POLICY", "KeyKind", "ModelPolicy"]


class KeyKind(Enum):
    """What the first dimension of a key counts. ``B`` requests, ``D`` of them decoding, ``T`` tokens scheduled."""

    ROW = "row"
    """A row a scheduled token, ``[T, ...]`` or padded: cached where it has a trailing shape."""
    DECODE_ROW = "decode-row"
    """A row a decoding request, ``[D, ...]``: handed to those, never cached."""
    REQUEST = "request"
    """A row a request, ``[B, ...]``."""
    SHARED = "shared"
    """One value for all."""
    LIST = "list"
    """A list with an entry a request, in batch order."""
    LIST_OF_ONE = "list-of-one"
    """A list whose first entry is for all."""
    OPAQUE = "opaque"
    """Handed on as it is."""


Kinds = Mapping[str, Union[KeyKind, "Kinds"]]
"""Kind by key; a mapping in place of a kind declares the items of a dict."""


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """vLLM-Omni's two model flags and, beyond them, the kinds of keys. A key without a kind is judged by its shape."""

    requires_full_prefix_cached_hidden_states: bool = True
    deferred_mm_cache_keys: frozenset[str] = frozenset()
    kinds: Kinds = field(default_factory=lambda: MappingProxyType({}))


DEFAULT_POLICY = ModelPolicy()
