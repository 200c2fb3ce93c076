"""Chooses the tiles of products of one, few or many rows, from the table of `configs`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shmllm_kernels.gpu.configs import TABLE
from shmllm_kernels.gpu.tiles import ANY


@dataclass(frozen=True, slots=True)
class SingleRowConfig:
    """The tile of a program of the product of one row.

    Attributes:
        block_n: the number of columns of a program, of both halves of a gated product together; a
            power of two.
        block_k: the number of elements of a row in one iteration, likewise.
        num_warps: the number of warps of a program.
    """

    block_n: int
    block_k: int
    num_warps: int


SINGLE_ROW = TABLE.of("single_row", SingleRowConfig)
"""Products of one row, by the elements of a row."""
SINGLE_ROW_TALL = TABLE.of("single_row_tall", SingleRowConfig)
"""The same with matrices of at least TALL rows."""
TALL = 65_536
# 64 runs of 4 bits are 2 KiB, and eight programs fit on a multiprocessor.
PACKED_ROW = TABLE.of("packed_row", SingleRowConfig)
"""Products of one row with packed matrices, by the elements of a row: whole runs of 64."""


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """The tile of a program of the product of up to eight rows.

    Attributes:
        block_n: the number of rows of the matrix that a program multiplies with, of both halves of
            a gated product together; a power of two, at least 16.
        depth: the number of elements of half a slice of an iteration, likewise.
        num_warps: the number of warps of a program, each with a slice of an iteration.
        num_stages: the stages of the compiler's pipeline: num_stages - 1 iterations are in flight.
    """

    block_n: int
    depth: int
    num_warps: int
    num_stages: int


# A matrix of 2,048 rows needs programs of 16 rows, or some multiprocessors have none: each has 32
# KiB of weights in registers and as many in each of two stages. More rows make programs of 32 that
# read the rows of x half as often, two on a multiprocessor.
FEW_ROWS = TABLE.of("few_rows", FewRowsConfig)
"""Products of up to eight rows, by the rows of the matrix."""
PACKED_FEW_ROWS = TABLE.of("packed_few_rows", FewRowsConfig)
"""The same with packed matrices; a slice of an iteration is a run of 64 elements."""
FEW_ROWS_FLOAT32 = TABLE.of("few_rows_float32", FewRowsConfig)


@dataclass(frozen=True, slots=True)
class ManyRowsConfig:
    """The tile of a program of the product of many rows.

    Attributes:
        block_m: the number of rows of a tile; a power of two.
        block_n: the number of rows of the matrix that they are multiplied with, of both halves of
            a gated product together, likewise.
        block_k: the number of elements of a row in one iteration, likewise.
        num_warps: the number of warps of a program.
        num_stages: the stages of the compiler's pipeline.
        programs: the number of programs of each multiprocessor.
        is_default: whether it has been measured to be faster than torch: 0 or 1.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    is_default: int

    @property
    def elements(self) -> int:
        """The number of elements of a tile."""
        return self.block_m * self.block_n

    def width(self, is_gated: bool) -> int:
        """Returns the number of columns of the result in a tile."""
        return self.block_n // 2 if is_gated else self.block_n


# A tile of 128 x 256 needs 80 bytes of shared memory in each cycle of the tensor cores, of 128 that
# it delivers. Fewer rows of the matrix make more tiles, of which each has a program of its own.
MANY_ROWS = TABLE.of("many_rows", ManyRowsConfig)
"""Products of many rows, by the rows of the matrix: of a residual stream's width, of the first
matrix of an MLP, and of a vocabulary's size."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The tile of a program of a decoder in one launch.

    Attributes:
        block_n, depth, num_warps, num_stages: as those of `FewRowsConfig`.
        programs: the number of programs of each multiprocessor.
        ahead: for how many iterations of weights a program asks the L2 cache while it waits.
        is_default: whether it has been measured to be faster than a launch for each product: 0 or
            1.
    """

    block_n: int
    depth: int
    num_warps: int
    num_stages: int
    programs: int
    ahead: int
    is_default: int


# One program for each multiprocessor: a meeting of two takes twice as long (`single_row_kernel`).
# It has 32 KiB of weights in registers, and as many in each of two stages.
DECODER = TABLE.of("decoder", DecoderConfig)
"""Decoders in one launch, by the elements of the residual stream."""
DECODER_FLOAT32 = TABLE.of("decoder_float32", DecoderConfig)


@dataclass(frozen=True, slots=True)
class AheadConfig:
    """How many weights the attention of up to eight tokens asks the L2 cache for.

    Attributes:
        kib: KiB, 0 for none.
    """

    kib: int


AHEAD = TABLE.of("ahead", AheadConfig)
"""Attention of a few tokens, by the elements of the residual stream."""


def ahead_config(hidden: int, key: str = ANY) -> AheadConfig:
    """Returns how many weights attention asks for before a residual stream of so many elements."""
    return AHEAD.best(key, hidden)


def single_row_config(n: int, k: int, key: str = ANY) -> SingleRowConfig:
    """Returns the tile of the product of one row with a matrix of n rows of k elements."""
    return (SINGLE_ROW_TALL if n >= TALL else SINGLE_ROW).best(key, k)


def packed_row_config(k: int = 0, key: str = ANY) -> SingleRowConfig:
    """Returns the tile of the product of one row with a packed matrix of rows of k elements."""
    return PACKED_ROW.best(key, k)


def few_rows_config(
    height: int, dtype: torch.dtype, is_packed: bool, key: str = ANY
) -> FewRowsConfig:
    """Returns the tile of the product of up to eight rows.

    Args:
        height: the number of rows of the matrix.
        dtype: the dtype of the rows. float32 uses no tensor cores.
        is_packed: whether the matrix is packed.
        key: one of DEVICE_KEYS.
    """
    of_dtype = FEW_ROWS_FLOAT32 if dtype is torch.float32 else FEW_ROWS
    return (PACKED_FEW_ROWS if is_packed else of_dtype).best(key, height)


def many_rows_config(height: int, key: str = ANY) -> ManyRowsConfig:
    """Returns the tile of the product of many rows with a matrix of so many rows."""
    return MANY_ROWS.best(key, height)


def decoder_config(hidden: int, dtype: torch.dtype, key: str = ANY) -> DecoderConfig:
    """Returns the tile of a decoder in one launch.

    Args:
        hidden: the elements of the residual stream.
        dtype: its dtype. float32 uses no tensor cores.
        key: one of DEVICE_KEYS.
    """
    return (DECODER_FLOAT32 if dtype is torch.float32 else DECODER).best(key, hidden)
