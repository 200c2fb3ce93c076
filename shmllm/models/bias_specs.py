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
    range of distances; half of the buckets are for keys behind the token.

    Attributes:
        num_positions: the largest number of positions.
        num_buckets: the number of buckets.
        max_distance: the distance from which on all keys are in one bucket.
    """

    num_positions: int
    num_buckets: int = 32
    max_distance: int = 128

    @property
    def width(self) -> int:
        """The number of distances, of both directions and of a token from itself."""
        return 2 * self.num_positions - 1


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
