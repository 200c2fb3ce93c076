"""The memory layout of a latent attention's cache on a CPU.

A block contains one row for each token: its latent, its rotated key part, and zeros up to whole
pairs of vectors. The row is the token's key, and its first elements are its value: one read serves
both products and all query heads. In bfloat16 the elements of a pair of vectors alternate: a shift
of a register's words gives the first vector in float32, and a mask gives the second. Behind it lies
the key of an indexer, if the layer has one, likewise padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, put_number
from shmllm_kernels.cpu.simd import LANES, STORED

DTYPES = ("float32", "float16", "bfloat16")
"""The dtype names of caches."""


PAIR = 2 * LANES
"""The number of elements in two vectors."""


@compiled
def padded(width):
    """Rounds a width up to whole pairs of vectors."""
    return (width + PAIR - 1) // PAIR * PAIR


@compiled
def place_of(element, kind):
    """Returns where an element of a row lies."""
    if kind != "bfloat16":
        return element
    within = element % PAIR
    return element - within + within % LANES * 2 + within // LANES


@compiled
def put_row(place, row, width, stored):
    """Writes a row of float32, and zeros up to whole pairs of vectors."""
    values = floats(row)
    for i in range(width):
        put_number(place, place_of(i, stored), values[i], stored)
    for i in range(width, padded(width)):
        put_number(place, place_of(i, stored), np.float32(0.0), stored)


@dataclass(frozen=True)
class LatentLayout:
    """The layout of one layer's cache.

    Args:
        key_dim: the width of a latent and of a rotated key part together.
        block_size: the number of tokens in a block; a power of two.
        stored: the dtype name of the cache, one of DTYPES.
        index_dim: the width of the key of an indexer; 0: there is none.
    """

    key_dim: int
    block_size: int
    stored: str
    index_dim: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, not {self.block_size}")

    @property
    def row_bytes(self) -> int:
        """The size of a token's row."""
        return self.index_offset + int(padded(self.index_dim)) * STORED[self.stored][1]

    @property
    def index_offset(self) -> int:
        """Where the key of an indexer begins in a row."""
        return int(padded(self.key_dim)) * STORED[self.stored][1]

    @property
    def block_bytes(self) -> int:
        """The size of a block in one layer."""
        return self.block_size * self.row_bytes
