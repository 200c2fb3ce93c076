"""What is added to the scores of attention by the distance of a key. This module must not import
torch: front ends import it too."""

from __future__ import annotations

from dataclasses import dataclass

MOST_BIASED_POSITIONS = 2**17
"""Each layer has a number for each head and distance: with 12 heads and so many positions 13 MB. A
file with more is damaged."""


@dataclass(frozen=True, slots=True)
class DistanceBiases:
    """What is added to the score of a key: a number that each head learns for its distance from the
    token, of which some are not told apart (Raffel et al., "T5", 2020, section 2.1). A bucket is a
    range of distances.

    Attributes:
        num_positions: the largest number of positions.
        num_buckets: the number of buckets.
        max_distance: the distance from which on all keys are in one bucket.
        both_ways: whether half of the buckets are for keys behind the token; else it attends to
            none of these.
    """

    num_positions: int
    num_buckets: int = 32
    max_distance: int = 128
    both_ways: bool = True

    @property
    def width(self) -> int:
        """The number of distances, of both directions and of a token from itself."""
        return 2 * self.num_positions - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationBiases:
    """What is added to the score of a key: products of the query, and of the key, with embeddings
    of their distance (disentangled attention; He et al., "DeBERTa", 2021, section 3.1). The scale
    of the scores multiplies them, too.

    Attributes:
        num_positions: the largest number of positions.
        span: half of the number of embeddings: the last ones are those of all distances beyond.
        furthest: the distance that the last embeddings stand for, where ranges of long distances
            share one; None: each distance has its own.
        of_queries: whether queries are multiplied by projections of embeddings to keys.
        of_keys: whether keys are multiplied by projections of embeddings to queries.
        shared: whether the projections of tokens are those of embeddings, too.
        key_bias: whether a projection to keys of their own has a bias.
        normed: whether embeddings have a norm.
    """

    num_positions: int
    span: int
    furthest: int | None
    of_queries: bool
    of_keys: bool
    shared: bool
    key_bias: bool = True
    normed: bool

    @property
    def num_rows(self) -> int:
        """The number of embeddings."""
        return 2 * self.span


@dataclass(frozen=True, slots=True)
class LinearBiases:
    """What is added to the score of a key: the distance from the token times a factor of the head,
    which is negative (ALiBi; Press et al., 2022). The distance is the same in both directions.

    Attributes:
        num_positions: the largest number of positions.
        num_heads: the number of heads of the whole model.
        steepness: the factor of the last of 2^n heads is ``-2 ** -steepness``.
    """

    num_positions: int
    num_heads: int
    steepness: int = 8
