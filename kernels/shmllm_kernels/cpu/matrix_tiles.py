"""Matrix products by tile instructions, with the operands of `products.MULTIPLY`."""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, short_words, word
from shmllm_kernels.cpu.products import DTYPES, KINDS, ROWS_AT_ONCE, Weights, finish, width_in
from shmllm_kernels.cpu.tile_instructions import (
    AMX,
    LINES,
    TILE_BYTES,
    W0X0,
    W0X1,
    W1X0,
    W1X1,
    put_tile,
)
from shmllm_kernels.cpu.tile_products import begin, columns_of, count_pieces_of, multiply_tiles
from shmllm_kernels.cpu.tile_rounding import (
    BLOCK_ROWS,
    WORD_BYTES,
    has_row_scales,
    padded_bytes,
    tiled,
)
from shmllm_kernels.cpu.unpacking import has_column_scales

COLUMNS_AT_ONCE = 8 * LINES
"""The largest number of columns in one piece of work, but for the last one."""


@compiled
def _join_digits(high, low, count):
    """Replaces int32 sums of the products of high digits by those of both, as float32."""
    highs, lows, joined = short_words(high), short_words(low), floats(high)
    for i in range(count):
        joined[i] = np.float32(highs[i]) * np.float32(256.0) + np.float32(lows[i])


@compiled
def _put_digits(job, sums, out, num_rows, num_w):
    """Writes the sums of a block of activations of two digits."""
    stride, columns, line, count = (
        job.out_stride, job.columns, job.line, LINES * job.line // WORD_BYTES,
    )  # fmt: skip
    first, second = sums + TILE_BYTES * W0X0, sums + TILE_BYTES * W1X0
    _join_digits(first, sums + TILE_BYTES * W0X1, count)
    put_tile(first, line, out, stride, num_rows, columns, "float32")
    if num_w == 2:
        _join_digits(second, sums + TILE_BYTES * W1X1, count)
        put_tile(second, line, out + 4 * columns, stride, num_rows, columns, "float32")


@compiled
def _put(job, weights, column, sums, out, num_rows, num_w, num_x):
    """Writes sums to the result; see `tile_products.Job`."""
    rows, stride, columns, kind = min(num_rows, BLOCK_ROWS), job.out_stride, job.columns, job.kind
    out, line = out + 4 * column, job.line
    if kind == "int16":
        _put_digits(job, sums, out, rows, num_w)
        return
    put_tile(sums + TILE_BYTES * W0X0, line, out, stride, rows, columns, kind)
    if num_w == 2:
        put_tile(sums + TILE_BYTES * W1X0, line, out + 4 * columns, stride, rows, columns, kind)
    if num_x == 2:
        below, rest = out + BLOCK_ROWS * stride, num_rows - BLOCK_ROWS
        put_tile(sums + TILE_BYTES * W0X1, line, below, stride, rest, columns, kind)
        if num_w == 2:
            put_tile(
                sums + TILE_BYTES * W1X1, line, below + 4 * columns, stride, rest, columns, kind
            )


@compiled
def _multiply_columns(job, weights, columns, x, out, num_rows, num_w):
    """Multiplies all rows of a piece with its columns, `num_w` tiles at a time."""
    column, width, end = columns.first, num_w * job.columns, columns.end
    while column < end:
        column = min(column, end - width)  # the last tile overlaps the one before
        soon = columns.following if column + width >= end else min(column + width, end - width)
        multiply_tiles(job, weights, column, soon, x, out, num_rows, num_w)
        column += width


@compiled
def _finish(x, x_stride, job, out, num_rows, columns, num_columns, weights):
    """Applies scales and the bias to a chunk of columns, by blocks of rows."""
    scales_at = (padded_bytes(weights.k, job.kind) >> 2) * job.line
    for row in range(0, num_rows, BLOCK_ROWS):
        finish(
            x + row * x_stride + scales_at if has_row_scales(job.kind) else 0, WORD_BYTES,
            out + row * job.out_stride, job.out_stride, min(num_rows - row, BLOCK_ROWS), columns,
            num_columns, weights,
        )  # fmt: skip


@compiled
def chunk_width(num_columns, num_threads):
    """Returns the number of columns in a piece of work; see `products.width_in`."""
    return width_in(2 * LINES, COLUMNS_AT_ONCE, num_columns, num_threads)


@compiled
def count_pieces(operands, piece, thread, num_threads):
    """Returns the number of pieces of a product."""
    num_rows, num_columns = word(word(operands, 0), 0), word(operands, 6)
    return count_pieces_of(num_rows, chunk_width(num_columns, num_threads), num_columns)


@compiled
def multiply_chunk(
    tiles, x_kind, weights, columns, x, x_stride, out, out_stride, all_rows, num_rows
):  # fmt: skip
    """Multiplies rows with some columns.

    Args:
        tiles: the instructions.
        x_kind: the dtype name of the activations.
        weights: the `products.Weights`.
        columns: the `tile_products.Columns`.
        x, x_stride: the first row's block; the bytes from row to row.
        out, out_stride: the first row of the result, float32; the bytes from row to row.
        all_rows: the number of rows that were rounded together.
        num_rows: the number of rows, at most ROWS_AT_ONCE.
    """
    num_columns = columns.end - columns.first
    width = min(num_columns, LINES)
    job = begin(tiles, _put, "", weights, x_kind, 0, width, all_rows, x_stride, out_stride)
    if num_columns >= 2 * LINES:
        _multiply_columns(job, weights, columns, x, out, num_rows, 2)
    else:
        _multiply_columns(job, weights, columns, x, out, num_rows, 1)
    tiles.release()
    if has_column_scales(weights.kind) or weights.bias != 0:
        _finish(x, x_stride, job, out, num_rows, columns.first, num_columns, weights)


@compiled
def multiply_by(tiles, operands, piece, num_threads, x_kind, kind, bias_kind):
    """Does one piece of a product with these instructions on tiles."""
    all_rows, x_stride, out_stride = (
        word(word(operands, 0), 0), word(operands, 2), word(operands, 4),
    )  # fmt: skip
    all_columns, k = word(operands, 6), word(operands, 7)
    weights = Weights(word(operands, 5), k, word(operands, 8), word(operands, 9), kind, bias_kind)
    width = chunk_width(all_columns, num_threads)
    num_chunks = all_columns // width
    row, chunk = piece // num_chunks * ROWS_AT_ONCE, piece % num_chunks
    multiply_chunk(
        tiles, x_kind, weights,
        columns_of(chunk, width, all_columns, num_threads, row + ROWS_AT_ONCE < all_rows),
        word(operands, 1) + row * x_stride, x_stride, word(operands, 3) + row * out_stride,
        out_stride, all_rows, min(ROWS_AT_ONCE, all_rows - row),
    )  # fmt: skip


@compiled
def _multiply(operands, piece, thread, num_threads, x_kind, kind, bias_kind):
    multiply_by(AMX, operands, piece, num_threads, x_kind, kind, bias_kind)


_KINDS = [
    *(kinds for kinds in KINDS if kinds[0] != "float32"),
    *(("int16", "int8", dtype) for dtype in DTYPES),
]

MULTIPLY = {
    (tiled(kinds[0]), *kinds[1:]): Kernel(count_pieces, _multiply, *kinds) for kinds in _KINDS
}
"""As `products.MULTIPLY`, for a process that has `amx.HAS_AMX`; x is what `tile_rounding.ROUND`
wrote for the same number of rows. AMX takes subnormal numbers for zero, in operands and sums."""
