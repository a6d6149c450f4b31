"""Token ids of prompts that are known as blocks: equal blocks have equal tokens, and nothing else has."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omnisim.importers.identity import Kind, identities
from omnisim.workload import TokenIds, pseudo_tokens

__all__ = ["Block", "BlockIds", "BlockTokens", "SharedStarts"]

BlockIds = NDArray[np.int64]
Block = tuple[int, int]
"""The id of a block and how many tokens it has: a partial block is never the full one, nor one of another length."""


class SharedStarts:
    """Blocks that begin with the same tokens, as a file says of them: a partition of the blocks for each position."""

    def __init__(self) -> None:
        self._leaders: dict[int, dict[Block, Block]] = defaultdict(dict)
        self._num_shared: dict[Block, int] = {}

    def join(self, one: Block, other: Block, num_tokens: int) -> None:
        """From now on the two have their first ``num_tokens`` in common."""
        for block in (one, other):
            self._num_shared[block] = max(num_tokens, self.num_shared(block))
        for position in range(num_tokens):
            first, second = sorted((self.leader(one, position), self.leader(other, position)))
            if first != second:
                self._leaders[position][second] = first

    def num_shared(self, block: Block) -> int:
        """How many of its first tokens a block may share with another."""
        return self._num_shared.get(block, 0)

    def leader(self, block: Block, position: int) -> Block:
        """The block whose token at ``position`` this one has."""
        leaders = self._leaders[position]
        while block in leaders:
            block = leaders[block]
        return block


@dataclass(frozen=True, slots=True, eq=False)
class BlockTokens:
    """Tokens of blocks of ``size`` tokens, a property of the format; lengths are multiplied by ``scale``.

    The block is scaled with the lengths, so a full block stays full and equal prefixes stay equal. Identities are
    those of the file, not the scaled ones.
    """

    size: int
    scale: float = 1.0
    starts: SharedStarts = field(default_factory=SharedStarts)

    def scaled(self, num_tokens: int) -> int:
        """How many tokens so many of the file become."""
        whole, rest = divmod(num_tokens, self.size)
        return whole * self._scaled_part(self.size) + (self._scaled_part(rest) if rest else 0)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens of the file; the last may be partial."""
        return -(-num_tokens // self.size)

    def tokens(self, ids: BlockIds, num_tokens: int) -> TokenIds:
        """Tokens of blocks with ``num_tokens`` in the file, int32 ``[scaled(num_tokens)]``."""
        assert len(ids) == self.num_blocks(num_tokens)
        whole, rest = divmod(num_tokens, self.size)
        tail = [self._block((int(ids[-1]), rest))] if rest else []
        return np.concatenate([self._full_blocks(ids[:whole]), *tail])

    def tokens_behind(self, ids: BlockIds, start: int, stop: int) -> TokenIds:
        """Tokens ``[start, stop)`` of the file, from the ids of its blocks from the one with ``start`` in it on."""
        before = start // self.size * self.size
        return self.tokens(ids, stop - before)[self.scaled(start - before) :]

    def complete(self, tail: Block, block: Block) -> None:
        """``tail``, a partial block, is how ``block`` begins."""
        self.starts.join(tail, block, self._scaled_part(tail[1]))

    def _scaled_part(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self.scale))

    def _full_blocks(self, ids: BlockIds) -> TokenIds:
        names = identities(Kind.BLOCK, ids, self.size)
        tokens = pseudo_tokens(names[:, None], _positions(self._scaled_part(self.size)))
        for at, number in enumerate(ids.tolist()):
            if self.starts.num_shared((number, self.size)):
                tokens[at] = self._block((number, self.size))
        return tokens.reshape(-1)

    def _block(self, block: Block) -> TokenIds:
        num_tokens, num_shared = self._scaled_part(block[1]), self.starts.num_shared(block)
        leaders = [self.starts.leader(block, position) for position in range(num_shared)]
        names = [_name(leader) for leader in leaders] + [_name(block)] * (num_tokens - num_shared)
        return pseudo_tokens(np.array(names, dtype=np.uint64), _positions(num_tokens))


def _name(block: Block) -> int:
    return int(identities(Kind.BLOCK, np.array([block[0]], dtype=np.int64), block[1])[0])


def _positions(num_tokens: int) -> NDArray[np.uint64]:
    return np.arange(num_tokens, dtype=np.uint64)
