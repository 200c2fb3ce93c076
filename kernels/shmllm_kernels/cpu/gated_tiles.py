"""The first half of a gated MLP by tile instructions: gate and up, and the activation, rounded.

The activation is computed of tiles of sums, a line for each column, and rounded to the layout in
which the MLP's other product reads it: nothing is transposed, and neither gate nor up are written.
The result has the bits that a product, `rows.ACTIVATE` and `tile_rounding.ROUND` give it.
"""

from __future__ import annotations

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, word
from shmllm_kernels.cpu.products import KINDS, ROWS_AT_ONCE, Weights, width_in
from shmllm_kernels.cpu.rows import activation
from shmllm_kernels.cpu.tile_instructions import AMX, LINES, TILE_BYTES, W0X0, W0X1, W1X0, W1X1
from shmllm_kernels.cpu.tile_products import begin, columns_of, count_pieces_of, multiply_tiles
from shmllm_kernels.cpu.tile_rounding import BLOCK_ROWS, WORD_BYTES, put_pairs, tiled
from shmllm_kernels.cpu.unpacking import has_column_scales

COLUMNS_AT_ONCE = 4 * LINES
"""The largest number of columns of gate, and as many of up, in one piece of work."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
WIDTH_STEP = 2 * LINES
"""The widths that the kernels compute are multiples of this."""


@compiled
def _scale_lines(lines, width, scales):
    """Multiplies the lines of a tile of sums by the scales of their columns."""
    values, factors = floats(lines), floats(scales)
    for line in range(LINES):
        for i in range(width):
            values[line * width + i] *= factors[line]


@compiled
def _put_block(job, weights, column, gate, up, out, num_rows):
    width = job.line // WORD_BYTES
    if has_column_scales(weights.kind):
        _scale_lines(gate, width, weights.scale + 4 * column)
        _scale_lines(up, width, weights.scale + 4 * (job.apart + column))
    gates, ups = floats(gate), floats(up)
    for i in range(LINES * width):
        gates[i] = activation(gates[i], job.activation) * ups[i]
    put_pairs(gate, out + (column >> 1) * job.line, job.line, num_rows)


@compiled
def _put(job, weights, column, sums, out, num_rows, num_w, num_x):
    """Writes the activation of sums; see `tile_products.Job`."""
    gate, up = sums + TILE_BYTES * W0X0, sums + TILE_BYTES * W1X0
    _put_block(job, weights, column, gate, up, out, min(num_rows, BLOCK_ROWS))
    if num_x == 2:
        gate, up = sums + TILE_BYTES * W0X1, sums + TILE_BYTES * W1X1
        below = out + BLOCK_ROWS * job.out_stride
        _put_block(job, weights, column, gate, up, below, num_rows - BLOCK_ROWS)


@compiled
def chunk_width(inner, num_threads):
    """Returns the number of columns of gate in a piece of work; see `products.width_in`."""
    return width_in(LINES, COLUMNS_AT_ONCE, inner, num_threads)


@compiled
def count_pieces(operands, piece, thread, num_threads):
    """Returns the number of pieces of work."""
    num_rows, inner = word(word(operands, 0), 0), word(operands, 6)
    return count_pieces_of(num_rows, chunk_width(inner, num_threads), inner)


@compiled
def multiply_chunk(
    tiles, x_kind, name, weights, inner, columns, x, x_stride, out, out_stride, all_rows, num_rows
):  # fmt: skip
    """Writes the activation of some columns of gate and up.

    Args:
        name: the name of the activation.
        inner: the number of columns of gate.
        out, out_stride: the first row's block of the result; the bytes from row to row.
        tiles, x_kind, weights, columns, x, x_stride, all_rows, num_rows: see
            `matrix_tiles.multiply_chunk`.
    """
    job = begin(tiles, _put, name, weights, x_kind, inner, LINES, all_rows, x_stride, out_stride)
    for column in range(columns.first, columns.end, LINES):
        soon = columns.following if column + LINES >= columns.end else column + LINES
        multiply_tiles(job, weights, column, soon, x, out, num_rows, 2)
    tiles.release()


@compiled
def multiply_by(tiles, operands, piece, num_threads, x_kind, kind, name):
    """Does one piece of work with these instructions on tiles."""
    all_rows, x_stride, out_stride = (
        word(word(operands, 0), 0), word(operands, 2), word(operands, 4),
    )  # fmt: skip
    inner = word(operands, 6)
    weights = Weights(word(operands, 5), word(operands, 7), word(operands, 8), 0, kind, kind)
    width = chunk_width(inner, num_threads)
    num_chunks = inner // width
    row, chunk = piece // num_chunks * ROWS_AT_ONCE, piece % num_chunks
    multiply_chunk(
        tiles, x_kind, name, weights, inner,
        columns_of(chunk, width, inner, num_threads, row + ROWS_AT_ONCE < all_rows),
        word(operands, 1) + row * x_stride, x_stride, word(operands, 3) + row * out_stride,
        out_stride, all_rows, min(ROWS_AT_ONCE, all_rows - row),
    )  # fmt: skip


@compiled
def _run(operands, piece, thread, num_threads, x_kind, kind, name):
    multiply_by(AMX, operands, piece, num_threads, x_kind, kind, name)


GATE_AND_UP = {
    (tiled("bfloat16"), kind, name): Kernel(count_pieces, _run, "bfloat16", kind, name)
    for kind in dict.fromkeys(kind for x_kind, kind, _ in KINDS if x_kind == "bfloat16")
    for name in ACTIVATIONS
}
"""Kernels by the kinds of activations and weights and the name of the activation. ``out = act(x @
gate.T) * (x @ up.T)``, for a process that has `amx.HAS_AMX`.

Operands: address of the number of rows; x as `tile_rounding.ROUND` writes it, its stride; out
likewise, the stride of rows of `inner`; weight [2 * inner, k] contiguous, gate before up; inner, a
multiple of WIDTH_STEP; k; scale or 0, see `products.Weights`.
"""
