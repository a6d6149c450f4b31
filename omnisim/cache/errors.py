"""What the cache refuses, sorted by who must act.

    PrefixCacheError(RuntimeError)
    ├── the model emits something else than it did, or than it declared
    │   ├── RowFormChanged        another width, rank, dtype or device form than the key was opened with
    │   ├── RowsMissing           fewer rows (or list entries) than the step needs
    │   ├── AmbiguousKey          a row a token or a row a request? no step so far shows which
    │   └── NestedRows            rows a token inside a dict, which the cache cannot merge
    ├── the runner hands over something that cannot be right
    │   ├── StagedCopyMismatch    ``hidden_states_cpu`` is no copy of ``hidden_states``
    │   ├── SlotOutOfRange        a slot that the cache does not have, or that two tokens of a step have
    │   ├── BlockTableTooShort    computed tokens past the blocks of the request
    │   └── BadCounts             numbers or places of tokens that cannot be true
    ├── the rows are not here
    │   ├── NeverWritten          nobody computed this slot while this cache was watching (external KV, null block)
    │   └── RowsDiscarded         deferred rows that were never staged, or dropped before they were committed
    └── this cache cannot do that
        ├── UnsupportedLayout     kernel blocks, context parallelism
        └── CacheMemoryExceeded   opening a key would pass ``max_nbytes``

Each names the key, the request and the step where it has them, what was expected and what was found.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousKey",
    "BadCounts",
    "BlockTableTooShort",
    "CacheMemoryExceeded",
    "NestedRows",
    "NeverWritten",
    "PrefixCacheError",
    "RowFormChanged",
    "RowsDiscarded",
    "RowsMissing",
    "SlotOutOfRange",
    "StagedCopyMismatch",
    "UnsupportedLayout",
]


class PrefixCacheError(RuntimeError):
    """A refusal. ``step`` counts the steps of this cache from 0 (-1 before the first)."""

    def __init__(
        self, *, expected: str, found: str, key: str | None = None, request: str | None = None, step: int | None = None
    ) -> None:
        self.expected, self.found = expected, found
        self.key, self.request, self.step = key, request, step
        where = [f"{name} {value!r}" for name, value in (("key", key), ("request", request)) if value is not None]
        if step is not None:
            where.append(f"step {step}")
        super().__init__(f"{', '.join(where)}: expected {expected}, found {found}" if where else
                         f"expected {expected}, found {found}")  # fmt: skip


class RowFormChanged(PrefixCacheError):
    """Rows of another width, rank or dtype than the key was opened with."""


class RowsMissing(PrefixCacheError):
    """Fewer rows or entries than the step needs."""


class AmbiguousKey(PrefixCacheError):
    """A key whose first dimension could so far be tokens as well as requests."""


class NestedRows(PrefixCacheError):
    """Rows a token inside a dict; flatten the payload to dotted names first."""


class StagedCopyMismatch(PrefixCacheError):
    """``hidden_states_cpu`` is not a contiguous CPU copy of ``hidden_states``."""


class SlotOutOfRange(PrefixCacheError):
    """A slot or block that the cache does not have, or a slot of two tokens."""


class BlockTableTooShort(PrefixCacheError):
    """Positions past the blocks that the request holds."""


class BadCounts(PrefixCacheError):
    """Numbers of tokens, or places of them in the batch, that cannot be true."""


class NeverWritten(PrefixCacheError):
    """A hit on slots that nobody computed while this cache was watching."""


class RowsDiscarded(PrefixCacheError):
    """A hit on deferred rows that nobody holds any more, and nobody committed."""


class UnsupportedLayout(PrefixCacheError):
    """A KV-cache layout in which one token's slot is not ``block_id * block_size + offset``."""


class CacheMemoryExceeded(PrefixCacheError):
    """A key that does not fit in ``max_nbytes``."""
