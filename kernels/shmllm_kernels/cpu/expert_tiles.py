"""The products of a mixture of experts by tile instructions.

`pairs.SORT` lays the pairs of a token and an expert out in blocks, each of one expert; here they
are called chunks, since tiles have blocks of rows. The rows of a chunk are rounded together, and
lie behind room for those that fill the last block of each chunk before. A piece of work is a chunk
and some columns. A pair's result has the bits that a product of its expert alone would give it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmllm_kernels.cpu import gated_tiles, matrix_tiles
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import itemsize, on_stack, put_word, word
from shmllm_kernels.cpu.pairs import BLOCK_WORDS
from shmllm_kernels.cpu.products import KINDS, ROWS_AT_ONCE, Weights
from shmllm_kernels.cpu.tile_instructions import AMX
from shmllm_kernels.cpu.tile_products import Columns, columns_of
from shmllm_kernels.cpu.tile_rounding import BLOCK_ROWS, line_bytes, round_rows, tiled
from shmllm_kernels.cpu.unpacking import row_bytes, scale_bytes

_BLOCKS = ROWS_AT_ONCE // BLOCK_ROWS
"""The largest number of blocks of rows in a chunk."""


def num_rounded_rows(num_pairs: int, num_chunks: int) -> int:
    """Returns the number of rows for which memory is needed."""
    return num_pairs + (BLOCK_ROWS - 1) * num_chunks


@compiled
def _first_row(chunk, first):
    """Returns where the rounded rows of a chunk begin, whose first pair is given."""
    return first + (BLOCK_ROWS - 1) * chunk


@compiled
def _chunk_word(operands, chunk, index):
    """Returns the expert, the first pair or the number of pairs of a chunk."""
    return word(word(operands, 1) + chunk * (8 * BLOCK_WORDS), index)


@compiled
def _count_blocks(operands, piece, thread, num_threads):
    return word(word(operands, 0), 0) * _BLOCKS


@compiled
def _round_block(operands, piece, thread, num_threads):
    chunk, row, width, stride = (
        piece // _BLOCKS, piece % _BLOCKS * BLOCK_ROWS, word(operands, 6), word(operands, 7),
    )  # fmt: skip
    first, count = _chunk_word(operands, chunk, 1), _chunk_word(operands, chunk, 2)
    num_rows, rows = min(BLOCK_ROWS, count - row), on_stack(8 * BLOCK_ROWS)
    for i in range(num_rows):
        token = word(word(operands, 4), first + row + i)
        put_word(rows, i, word(operands, 2) + token * word(operands, 3))
    if num_rows > 0:
        out = word(operands, 5) + (_first_row(chunk, first) + row) * stride
        round_rows(rows, width, 0, width, out, num_rows, line_bytes(count), "bfloat16")


ROUND_PAIRS = Kernel(_count_blocks, _round_block)
"""Rounds the activations of all pairs to bfloat16.

Operands (addresses; strides in bytes):

    0  the address of the number of chunks, 1  chunks: the blocks of `pairs.SORT`
    2  x [tokens, width] float32, 3  its stride
    4  tokens: int64, the row of x of each sorted pair
    5  out: memory for `num_rounded_rows`
    6  width
    7  the stride of out, `tile_rounding.row_bytes`
"""


@compiled
def _of_expert(operands, expert, num_columns, kind, bias, bias_kind):
    """Returns one expert's weights, [num_columns, k]."""
    k, first = word(operands, 8), expert * num_columns
    return Weights(
        word(operands, 6) + first * row_bytes(k, kind), k,
        word(operands, 9) + first * scale_bytes(k, kind),
        bias + first * itemsize(bias_kind) if bias != 0 else 0, kind, bias_kind,
    )  # fmt: skip


@compiled
def count_gated(operands, piece, thread, num_threads):
    """Returns the number of pieces of GATE_AND_UP."""
    inner = word(operands, 7)
    return word(word(operands, 0), 0) * (inner // gated_tiles.chunk_width(inner, num_threads))


class _Piece(NamedTuple):
    """A piece of work.

    expert: the expert.
    first, count: the first pair of the chunk, and the number of its pairs.
    row: where their rounded rows begin.
    columns: the columns.
    """

    expert: Any
    first: Any
    count: Any
    row: Any
    columns: Columns


@compiled
def _piece_of(operands, piece, width, num_threads):
    """Returns the chunk of rows and the columns of a piece of GATE_AND_UP or DOWN."""
    num_columns = word(operands, 7)
    per_chunk = num_columns // width
    chunk = piece // per_chunk
    first = _chunk_word(operands, chunk, 1)
    return _Piece(
        _chunk_word(operands, chunk, 0), first, _chunk_word(operands, chunk, 2),
        _first_row(chunk, first),
        columns_of(piece % per_chunk, width, num_columns, num_threads, False),
    )  # fmt: skip


@compiled
def gate_and_up_by(tiles, operands, piece, num_threads, kind, name):
    """Does a piece of GATE_AND_UP with these instructions on tiles."""
    inner, x_stride, out_stride = word(operands, 7), word(operands, 3), word(operands, 5)
    own = _piece_of(operands, piece, gated_tiles.chunk_width(inner, num_threads), num_threads)
    weights = _of_expert(operands, own.expert, 2 * inner, kind, 0, kind)
    gated_tiles.multiply_chunk(
        tiles, "bfloat16", name, weights, inner, own.columns,
        word(operands, 2) + own.row * x_stride, x_stride,
        word(operands, 4) + own.row * out_stride, out_stride, own.count, own.count,
    )  # fmt: skip


@compiled
def _gate_and_up(operands, piece, thread, num_threads, kind, name):
    gate_and_up_by(AMX, operands, piece, num_threads, kind, name)


GATE_AND_UP = {
    kinds: Kernel(count_gated, _gate_and_up, *kinds[1:]) for kinds in gated_tiles.GATE_AND_UP
}
"""Kernels by the keys of `gated_tiles.GATE_AND_UP`, which they compute for each pair.

Operands: 0 and 1 of ROUND_PAIRS, then

    2  x: what ROUND_PAIRS wrote, 3  its stride
    4  out: likewise, rows of inner, 5  its stride
    6  weights [experts, 2 * inner, k] contiguous, 7  inner, 8  k
    9  scales of each expert or 0, see `products.Weights`
"""


@compiled
def count_down(operands, piece, thread, num_threads):
    """Returns the number of pieces of DOWN."""
    columns = word(operands, 7)
    return word(word(operands, 0), 0) * (columns // matrix_tiles.chunk_width(columns, num_threads))


@compiled
def down_by(tiles, operands, piece, num_threads, kind, bias_kind):
    """Does a piece of DOWN with these instructions on tiles."""
    num_columns, x_stride, out_stride = word(operands, 7), word(operands, 3), word(operands, 5)
    width = matrix_tiles.chunk_width(num_columns, num_threads)
    own = _piece_of(operands, piece, width, num_threads)
    weights = _of_expert(operands, own.expert, num_columns, kind, word(operands, 10), bias_kind)
    matrix_tiles.multiply_chunk(
        tiles, "bfloat16", weights, own.columns, word(operands, 2) + own.row * x_stride, x_stride,
        word(operands, 4) + own.first * out_stride, out_stride, own.count, own.count,
    )  # fmt: skip


@compiled
def _down(operands, piece, thread, num_threads, kind, bias_kind):
    down_by(AMX, operands, piece, num_threads, kind, bias_kind)


DOWN = {
    (tiled(kinds[0]), *kinds[1:]): Kernel(count_down, _down, *kinds[1:])
    for kinds in KINDS
    if kinds[0] == "bfloat16"
}
"""Kernels by the kinds of activations, weights and bias.

Operands: 0 and 1 of ROUND_PAIRS, then

    2  x: what GATE_AND_UP wrote, 3  its stride
    4  out [pairs, columns] float32, in the order of the sorted pairs, 5  its stride
    6  weights [experts, columns, k] contiguous, 7  columns, 8  k
    9  scales of each expert or 0, 10  bias [experts, columns] or 0
"""
