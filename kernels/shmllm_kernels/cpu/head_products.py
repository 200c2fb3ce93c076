"""Products with a matrix of its own for each head, all heads in one kernel.

``out[row, head] = x[row, head] @ weight[head].T``. A piece of work is some rows, a head and a chunk
of columns. The tiles are those of `products`: a head's result has the bits that a product of that
head alone would give it.
"""

from __future__ import annotations

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import itemsize, word
from shmllm_kernels.cpu.product_tiles import IN_ORDER, TILE_COLUMNS
from shmllm_kernels.cpu.products import (
    DTYPES,
    ROWS_AT_ONCE,
    Rows,
    Weights,
    product,
    width_in,
)


@compiled
def _chunk_width(num_columns, num_heads, num_threads):
    """Returns the number of columns in a piece; the last one of a head has the rest, too."""
    width = width_in(TILE_COLUMNS, num_columns, num_columns * num_heads, num_threads)
    return min(width, num_columns)


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_rows, num_heads, num_columns = (
        word(word(operands, 0), 0), word(operands, 8), word(operands, 9),
    )  # fmt: skip
    num_chunks = num_columns // _chunk_width(num_columns, num_heads, num_threads)
    return (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * num_heads * num_chunks


@compiled
def _multiply(operands, piece, thread, num_threads, x_kind, kind):
    num_rows, num_heads, num_columns, k = (
        word(word(operands, 0), 0), word(operands, 8), word(operands, 9), word(operands, 10),
    )  # fmt: skip
    x_stride, out_stride = word(operands, 2), word(operands, 5)
    width = _chunk_width(num_columns, num_heads, num_threads)
    num_chunks = num_columns // width
    chunk, head = piece % num_chunks, piece // num_chunks % num_heads
    first_row = piece // num_chunks // num_heads * ROWS_AT_ONCE
    column = chunk * width
    x = word(operands, 1) + first_row * x_stride + head * word(operands, 3)
    out = word(operands, 4) + first_row * out_stride + head * word(operands, 6)
    weight = word(operands, 7) + head * num_columns * k * itemsize(kind)
    product(
        Rows(x, x_stride, 0, x_kind, IN_ORDER), min(ROWS_AT_ONCE, num_rows - first_row),
        Weights(weight, k, 0, 0, kind, kind), column,
        num_columns - column if chunk == num_chunks - 1 else width, out, out_stride,
    )  # fmt: skip


KINDS = [*(("float32", dtype) for dtype in DTYPES), ("bfloat16", "bfloat16")]
"""The dtype names of activations and weights that kernels exist for."""

MULTIPLY_HEADS = {kinds: Kernel(_pieces, _multiply, *kinds) for kinds in KINDS}
"""Kernels by the dtype names of x and weights; out is float32.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  the address of the number of rows
    1  x, 2 its stride from row to row, 3 from head to head (numbers)
    4  out, 5 its stride from row to row, 6 from head to head (numbers)
    7  weights [heads, columns, k] contiguous
    8  heads, 9 columns, 10 k (numbers)
"""
