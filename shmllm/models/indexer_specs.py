"""What chooses the tokens, or the blocks of keys, that an attention reads.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Chosen(NamedTuple):
    """How much each token attends to at most.

    Attributes:
        num_heads: the number of choices, which are equally large.
        top_k: the number of blocks of each.
        size: the number of consecutive keys of a block, which begins at a multiple of it.
    """

    num_heads: int
    top_k: int
    size: int = 1

    def entries(self, block_size: int) -> int:
        """The most entries of a choice: keys, or blocks of the cache of so many tokens."""
        return self.top_k * max(self.size // block_size, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """What chooses the tokens that each token attends to (DeepSeek-AI, "DeepSeek-V3.2", 2025,
    section 2.1): those with the largest ``sum over heads of weight * max(query . key, 0)``, where
    all heads share a token's key.

    Attributes:
        num_heads: the number of heads.
        head_dim: the width of a head's query, and of a key. Its first elements rotate, as many as
            those of the attention, by the same angles.
        top_k: how many tokens it chooses at most.
        interleaved: whether neighbouring elements rotate together; see `RopeConfig`.
        is_shared: whether it is that of a layer before this one, whose choice is read again. The
            cache has room for its keys in this layer, too: slots are the same in layers of one
            group, whose rows have one size.
        rotates_last: how many elements rotate that are the last ones of a query and a key in
            checkpoints; 0: those that rotate are the first ones there, too.
        norm_eps: the eps of the norm of keys.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    is_shared: bool = False
    rotates_last: int = 0
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerSpec:
    """What chooses the blocks of keys that each token attends to, for each key-value head of an
    attention of heads (`MiniMaxM3VLIndexer` of transformers): the last ones, and those with the
    largest ``query . key`` of a key. It has a query for each key-value head, and one key for all.
    Both have the norms of heads that the attention has, before its rotation.

    Attributes:
        head_dim: the width of a query and of a key.
        size: the number of keys of a block, which begins at a multiple of it.
        top_k: how many blocks it chooses at most.
        num_local: how many of these are the last ones, that of the token included.
    """

    head_dim: int
    size: int
    top_k: int
    num_local: int

    def chosen(self, num_heads: int) -> Chosen:
        """Returns how much a token attends to at most, with so many key-value heads."""
        return Chosen(num_heads, self.top_k, self.size)
