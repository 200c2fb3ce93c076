"""Attention to a window of keys and to entries, each of which stands for several tokens.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shmllm.models.indexer_specs import IndexerSpec
from shmllm.models.kv_heads import KVHeads
from shmllm.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSpec:
    """What makes entries of tokens. An entry is a sum of their values, each element of which is
    weighted by a softmax of gates over the tokens, with a norm, rotated by the position of the
    first token.

    Attributes:
        rate: the number of tokens of an entry, and from one entry to the next.
        overlaps: whether an entry is made of the tokens of the entry before it, too, with values
            and gates of their own.
    """

    rate: int
    overlaps: bool = False

    @property
    def reach(self) -> int:
        """The number of tokens that an entry is made of."""
        return self.rate * (2 if self.overlaps else 1)

    def widths(self, dim: int) -> tuple[int, int]:
        """Returns the widths of what a token contributes to entries of a width: values, gates."""
        width = dim * (2 if self.overlaps else 1)
        return width, width


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec:
    """The attention of DeepSeek V4 (DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3). All heads share
    one key, which is its value, too. A token attends to the keys of a window and to the entries
    that were made of tokens up to its own.

    Attributes:
        num_heads: the number of query heads.
        head_dim: the width of a query, and of a key.
        query_rank: the width of what queries are a projection of, which has a norm.
        window: the number of positions whose keys a token attends to, its own included.
        rope: the rotation of the last elements of queries, keys and entries, of neighbours. The
            output of a head is rotated back, by the position of its token.
        groups: the number of groups of heads whose outputs are projected by themselves.
        group_rank: the width of what each is projected to.
        norm_eps: the eps of all norms.
        compression: what makes entries; None: there are none.
        indexer: what chooses the entries that a token attends to, by keys that are entries of
            their own; None: these are all.
        num_positions: the largest number of positions of a request.
    """

    num_heads: int
    head_dim: int
    query_rank: int
    window: int
    rope: RopeConfig
    groups: int
    group_rank: int
    norm_eps: float
    compression: CompressionSpec | None = None
    indexer: IndexerSpec | None = None
    num_positions: int

    state_bytes = 0

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def width(self) -> int:
        """The width of the outputs of all groups, which the output projection reads."""
        return self.groups * self.group_rank

    @property
    def query_width(self) -> int:
        """The width of all queries, and of what all heads return."""
        return self.num_heads * self.head_dim

    @property
    def first_widths(self) -> tuple[int, int]:
        """The widths of what one product makes of the hidden state: `query_rank`, and a key."""
        return self.query_rank, self.head_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """The widths of what a token contributes to entries, and to keys of an indexer."""
        if self.compression is None:
            return ()
        dims = [self.head_dim] + ([] if self.indexer is None else [self.indexer.head_dim])
        return tuple(width for dim in dims for width in self.compression.widths(dim))

    def most_entries(self, num_positions: int) -> int:
        """Returns the largest number of entries that a token of a request attends to, which has at
        most so many positions."""
        if self.compression is None:
            return 0
        entries = num_positions // self.compression.rate
        return entries if self.indexer is None else min(entries, self.indexer.top_k)

    @property
    def most_listed(self) -> int:
        """The largest number of keys and entries that a token attends to."""
        return self.window + self.most_entries(self.num_positions)

    @property
    def kept_window(self) -> int:
        """The number of positions whose rows in the cache are read."""
        return max(self.window, 0 if self.compression is None else self.compression.reach)

    @property
    def linear_widths(self) -> tuple[int, ...]:
        """The widths of the outputs of the projections before the attention."""
        widths = [sum(self.first_widths), self.query_width]
        if self.compression is not None:
            widths.append(sum(self.parts))
        if (indexer := self.indexer) is not None:
            widths += [indexer.num_heads, indexer.num_heads * indexer.head_dim]
        return tuple(widths)

    @property
    def read_widths(self) -> tuple[int, ...]:
        """The widths of what products read, but for the hidden state and `width`."""
        return self.query_rank, self.query_width

    @property
    def kv(self) -> KVHeads:
        """What a row of the cache has: a key, and what its token contributes to entries."""
        return KVHeads(1, self.head_dim, 0, sum(self.parts))

    @property
    def entries(self) -> KVHeads | None:
        """What an entry of the cache has; None: there are none."""
        if self.compression is None:
            return None
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        return KVHeads(1, self.head_dim, 0, index_dim, self.compression.rate)
