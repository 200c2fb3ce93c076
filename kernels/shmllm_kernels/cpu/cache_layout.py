"""The memory layout of one layer's KV cache on a CPU, and the numbers that kernels need about it.

A block contains, for each key-value head, its keys and after them its values:

    keys    [head_dim, block_size padded to whole vectors]
    values  [block_size, value_dim padded to whole vectors]
    scales  [2, block_size padded to whole vectors] float32, of keys and values, if these are int8

Behind all heads it has the keys of an indexer, if the layer has one, as those of a head without
values.

Keys are transposed, so that a vector holds one dimension of consecutive keys. For tile instructions
(IN_TILES) pairs of bfloat16 are the elements of such matrices, as the second operand of a product
has them:

    keys    [head_dim padded to whole tiles / 2, block_size, 2 dimensions]
    values  [block_size / 2, value_dim padded to whole tiles, 2 tokens]

A head's part of a block is contiguous, which helps prefetching and copying. Padding stays zero.
Each token has a scale of its own: one for the whole block would change what earlier tokens were
rounded to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.cpu.simd import LANES, STORED

DTYPES = ("float32", "float16", "bfloat16")
IN_TILES = "bfloat16 tiles"
"""What the dtype of a cache for tile instructions is called."""
TILE_KEYS = 16
"""The number of keys in a tile; a multiple of it is a block of such a cache."""
TILE_DIMS = 32
"""The number of dimensions of a key in a tile; values have half as many."""
KINDS = [(stored, dtype) for stored in (*DTYPES, "int8") for dtype in DTYPES]
"""The dtype names of the cache and of the model's weights that kernels exist for."""
TILE_KINDS = [(IN_TILES, dtype) for dtype in DTYPES]
"""Those that use tile instructions."""


def _padded(count: int, whole: int = LANES) -> int:
    return -(-count // whole) * whole


def dtype_of(stored: str) -> str:
    """Returns the dtype name of the numbers in a cache."""
    return "bfloat16" if stored == IN_TILES else stored


@dataclass(frozen=True)
class CacheLayout:
    """The layout of one layer's cache.

    Args:
        num_kv_heads: the number of key-value heads.
        head_dim: the size of a key; even.
        block_size: the number of tokens in a block; a power of two.
        stored: the dtype name of the cache: float32, float16, bfloat16 or int8; or IN_TILES, whose
            blocks have whole tiles.
        value_size: the size of a value; None: that of a key.
        index_dim: the size of the key of an indexer; 0: there is none.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    stored: str
    value_size: int | None = None
    index_dim: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, not {self.block_size}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        if self.is_tiled and self.block_size % TILE_KEYS:
            raise ValueError(f"block_size {self.block_size} is no multiple of {TILE_KEYS}")

    @property
    def is_tiled(self) -> bool:
        """Whether the cache is for tile instructions."""
        return self.stored == IN_TILES

    @property
    def value_dim(self) -> int:
        """The size of a value."""
        return self.head_dim if self.value_size is None else self.value_size

    @property
    def itemsize(self) -> int:
        return STORED[dtype_of(self.stored)][1]

    @property
    def keys_shape(self) -> tuple[int, int]:
        """The shape of one head's keys in a block, which lie in pairs if they are in tiles."""
        if self.is_tiled:
            return _padded(self.head_dim, TILE_DIMS), self.block_size
        return self.head_dim, _padded(self.block_size)

    @property
    def values_shape(self) -> tuple[int, int]:
        """The shape of one head's values in a block, likewise."""
        return self.block_size, _padded(self.value_dim, TILE_DIMS // 2 if self.is_tiled else LANES)

    @property
    def key_bytes(self) -> int:
        """The size of one head's keys in a block, which is also the offset of its values."""
        return self.keys_shape[0] * self.keys_shape[1] * self.itemsize

    @property
    def value_bytes(self) -> int:
        """The size of one head's values in a block."""
        return self.values_shape[0] * self.values_shape[1] * self.itemsize

    @property
    def scale_row_bytes(self) -> int:
        """The size of the scales of a head's keys in a block, or of its values."""
        return _padded(self.block_size) * 4 if self.stored == "int8" else 0

    @property
    def head_bytes(self) -> int:
        """The stride from one head of a block to the next."""
        return self.key_bytes + self.value_bytes + 2 * self.scale_row_bytes

    @property
    def block_bytes(self) -> int:
        """The size of a block in one layer: keys and values of all heads, keys of an indexer."""
        return self.index_offset + (self.index.block_bytes if self.index_dim else 0)

    @property
    def index_offset(self) -> int:
        """Where the keys of an indexer begin in a block."""
        return self.num_kv_heads * self.head_bytes

    @property
    def index(self) -> CacheLayout:
        """The layout of the keys of an indexer, which are never in tiles."""
        return CacheLayout(1, self.index_dim, self.block_size, dtype_of(self.stored), 0)

    @property
    def keys_per_vector(self) -> int:
        return TILE_KEYS if self.is_tiled else min(LANES, self.block_size)


def head_words(
    layout: CacheLayout,
    num_heads: int,
    scale: float | None = None,
    block_stride: int | None = None,
) -> NDArray[np.int64]:
    """Returns the numbers that kernels need about the heads, in the order of the names below.

    Args:
        layout: the layout of the cache.
        num_heads: the number of query heads; a multiple of `layout.num_kv_heads`.
        scale: the factor of the scores; None: head_dim**-0.5.
        block_stride: the bytes from one block of the layer to the next; None: its blocks follow
            each other.
    """
    if num_heads % layout.num_kv_heads:
        raise ValueError(f"{num_heads} heads cannot share {layout.num_kv_heads} key-value heads")
    scale = layout.head_dim**-0.5 if scale is None else scale
    vectors_per_block = max(layout.block_size // layout.keys_per_vector, 1)
    words = [
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size.bit_length() - 1,
        vectors_per_block.bit_length() - 1,
        layout.keys_per_vector,
        layout.block_bytes if block_stride is None else block_stride,
        layout.head_bytes,
        layout.key_bytes,
        layout.keys_shape[1] * layout.itemsize,
        layout.values_shape[1] * layout.itemsize,
        num_heads,
        word_of_float(scale * math.log2(math.e)),
        layout.key_bytes + layout.value_bytes,
        layout.scale_row_bytes,
        layout.value_dim,
    ]
    return np.array(words, np.int64)


(
    NUM_KV_HEADS,
    HEAD_DIM,
    BLOCK_SHIFT,  # log2 of the block size
    VECTOR_SHIFT,  # log2 of the vectors that hold one dimension of a block's keys, or of its tiles
    KEYS_PER_VECTOR,
    BLOCK_STRIDE,  # from one block to the next
    HEAD_BYTES,
    KEY_BYTES,
    DIMENSION_BYTES,  # from one dimension of the keys to the next; in tiles half of that of a pair
    VALUE_ROW_BYTES,  # from one value to the next, likewise
    NUM_HEADS,  # query heads
    SCALE,  # the bits of the float32 scale * log2(e), the factor of queries
    SCALES_AT,  # from a head's keys to the scales of its keys
    SCALE_ROW_BYTES,  # from these to the scales of its values
    VALUE_DIM,
) = range(15)
"""The indices of the numbers that `head_words` returns."""
