"""Matrix products of activations with weights in the layout of checkpoints.

``out[m, n] = sum over k of x[m, k] * weight[n, k]``: both operands are read along their rows, so
weights need no packed copy. Every element is summed in the same order, for any number of rows and
in any tile: results do not depend on the batch, to the last bit.

`product_tiles` emits the code of a tile, `unpacking` brings weights of few bits into a form that it
reads; this module owns the order of tiles, and what comes after a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmllm_kernels.cpu.arithmetic import ARITHMETIC
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_noinline
from shmllm_kernels.cpu.memory import floats, itemsize, number, on_stack, word
from shmllm_kernels.cpu.product_tiles import (
    IN_ORDER,
    PREFETCHED_ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    column_tile,
    eager_row_tile,
    eager_tile,
    row_tile,
    tile,
    unpacking_row_tile,
)
from shmllm_kernels.cpu.unpacking import (
    MAX_DEPTH,
    PACKINGS,
    SCALES_BYTES,
    has_column_scales,
    is_unpacked,
    panel,
    panel_stride,
    part_step,
    row_bytes,
    scale_bytes,
    unpack,
    widen_scales,
)

ROWS_AT_ONCE = 128
"""The number of rows of activations that stay in a core's L2 cache while weights stream through."""

FEW_ROWS = 2 * TILE_ROWS
"""Up to so many rows, a tile prefetches the weights of all the next columns; with more, the first
TILE_COLUMNS / PREFETCHED_ROWS tiles do it together."""

COLUMNS_AT_ONCE = 8 * TILE_COLUMNS
"""The largest number of columns in one piece of work."""

DEPTH_AT_ONCE = MAX_DEPTH
"""The largest number of a row's elements that are summed before the sum is stored: the data that a
tile reads from all its rows then stays in the L1 cache. This decides the order of additions."""

CHUNKS_PER_THREAD = 4
"""The smallest number of pieces for each thread, if there are enough columns: other threads then
take the pieces that a preempted thread has not begun."""


def width_of(kind: str) -> int:
    """Returns the number of elements that a tile multiplies at a time."""
    return ARITHMETIC[kind].width


class Rows(NamedTuple):
    """The rows of activations that a product reads.

    kind: the dtype name, which decides how the product multiplies; see `arithmetic`.
    order: IN_ORDER: row i lies at `address + i * stride`; LISTED: row `indices[i]` does.
    indices: the address of int64; unused if the rows are in order, as rows of int8 have to be.
    """

    address: Any
    stride: Any
    indices: Any
    kind: str
    order: str


class Weights(NamedTuple):
    """A matrix of weights.

    address: [columns, k] of dtype `kind`, or packed, contiguous; see `unpacking`.
    scale: the address of [columns] float32, or of the scales of packed weights, or 0.
    bias: the address of [columns] of dtype `bias_kind`, or 0.
    """

    address: Any
    k: Any
    scale: Any
    bias: Any
    kind: str
    bias_kind: str


@compiled
def _multiply_rows(
    x, x_stride, indices, w, w_stride, k, out, out_stride, num_rows, adds, correction, kind,
    x_kind, order, tile, row_tile, prefetched,
):  # fmt: skip
    ahead = w + TILE_COLUMNS * w_stride
    prefetching = TILE_COLUMNS // prefetched * TILE_ROWS
    row = 0
    while row + TILE_ROWS <= num_rows:
        tile(
            x, x_stride, indices, row, w, w_stride, k, out + row * out_stride, out_stride, adds,
            ahead, correction, kind, x_kind, order,
        )  # fmt: skip
        row += TILE_ROWS
        ahead = ahead + prefetched * w_stride if row < prefetching else w
    while row < num_rows:
        row_tile(
            x, x_stride, indices, row, w, w_stride, k, out + row * out_stride, out_stride, adds,
            ahead, correction, kind, x_kind, order,
        )  # fmt: skip
        row += 1


@compiled_noinline
def _multiply_tiles(
    x, x_stride, indices, w, w_stride, k, out, out_stride, num_rows, adds, correction, kind,
    x_kind, order,
):  # fmt: skip
    """Multiplies all rows with the columns of one tile, over a part of k."""
    _multiply_rows(
        x, x_stride, indices, w, w_stride, k, out, out_stride, num_rows, adds, correction, kind,
        x_kind, order, tile, row_tile, PREFETCHED_ROWS,
    )  # fmt: skip


@compiled_noinline
def _multiply_few_rows(
    x, x_stride, indices, w, w_stride, k, out, out_stride, num_rows, adds, correction, kind,
    x_kind, order,
):  # fmt: skip
    """As `_multiply_tiles`, for up to FEW_ROWS rows, which wait for the weights."""
    _multiply_rows(
        x, x_stride, indices, w, w_stride, k, out, out_stride, num_rows, adds, correction, kind,
        x_kind, order, eager_tile, eager_row_tile, TILE_COLUMNS,
    )  # fmt: skip


@compiled_noinline
def _multiply_column(
    x, x_stride, indices, w, w_stride, k, out, out_stride, num_rows, adds, correction, kind,
    x_kind, order,
):  # fmt: skip
    """Multiplies all rows with one column, over a part of k."""
    for row in range(num_rows):
        column_tile(
            x, x_stride, indices, row, w, w_stride, k, out + row * out_stride, out_stride, adds, w,
            correction, kind, x_kind, order,
        )  # fmt: skip


@compiled_noinline
def _multiply_packed_row(
    x, w, w_stride, scales, scale_stride, k, out, adds, kind, x_kind
):  # fmt: skip
    """Multiplies one row with the columns of one tile, over a part of k, without a panel."""
    widened = on_stack(TILE_COLUMNS * SCALES_BYTES)
    for column in range(TILE_COLUMNS):
        own = widened + column * SCALES_BYTES
        widen_scales(scales + column * scale_stride, k, own, kind)
    unpacking_row_tile(x, 0, w, w_stride, widened, SCALES_BYTES, k, out, 0, adds, kind, x_kind)


@compiled
def num_parts(k):
    """Returns the number of parts of k that are summed one after the other."""
    return (k + DEPTH_AT_ONCE - 1) // DEPTH_AT_ONCE


@compiled
def part_depth(k, step):
    """Returns the number of elements, a multiple of `step`, in each part of k but the last."""
    return ((k + num_parts(k) - 1) // num_parts(k) + step - 1) // step * step


@compiled
def corrections_at(k):
    """Returns where, in a row of int8 activations, the parts' corrections begin; the scale of the
    row follows them. See `rounding.ROUND`."""
    return (k + 3) // 4 * 4


@compiled
def finish(scales, scale_stride, out, out_stride, num_rows, columns, num_columns, weights):
    """Computes ``out * scale of the row * scale + bias`` over a chunk of columns.

    scales, scale_stride: row i's scale lies at ``scales + i * scale_stride``; scales 0: none.
    """
    for row in range(num_rows):
        values = floats(out + row * out_stride + columns * 4)
        if scales != 0:
            own = floats(scales + row * scale_stride)[0]
            for column in range(num_columns):
                values[column] *= own
        if has_column_scales(weights.kind):
            factors = floats(weights.scale + columns * 4)
            for column in range(num_columns):
                values[column] *= factors[column]
        if weights.bias != 0:
            for column in range(num_columns):
                values[column] += number(weights.bias, columns + column, weights.bias_kind)


def _step_of(kind: str, x_kind: str) -> int:
    """Returns the number of elements that parts of k have a multiple of."""
    return part_step(kind) if is_unpacked(kind, x_kind) else width_of(x_kind)


@compiled
def _product(rows, num_rows, weights, columns, num_columns, out, out_stride, multiply, width):
    """Calls `multiply`, which computes a tile of `width` columns, for all tiles and parts of k."""
    k, kind, x_kind = weights.k, weights.kind, rows.kind
    depth = part_depth(k, _step_of(kind, x_kind))
    w_stride, scale_stride = row_bytes(k, kind), scale_bytes(k, kind)
    unpacked = panel(width, kind, x_kind)
    end = columns + num_columns
    column = columns
    while column < end:
        column = min(column, end - width)  # the last tile overlaps the one before
        for part in range(num_parts(k)):
            begin = part * depth
            some = min(depth, k - begin)
            x = rows.address + itemsize(x_kind) * begin
            w = weights.address + column * w_stride + row_bytes(begin, kind)
            correction = corrections_at(k) + 4 * part - begin
            if is_unpacked(kind, x_kind):
                scale = weights.scale + column * scale_stride + scale_bytes(begin, kind)
                if num_rows == 1 and width == TILE_COLUMNS and rows.order == IN_ORDER:
                    _multiply_packed_row(
                        x, w, w_stride, scale, scale_stride, some, out + 4 * column, begin, kind,
                        x_kind,
                    )  # fmt: skip
                else:
                    unpack(w, w_stride, scale, scale_stride, width, some, unpacked, kind, x_kind)
                    multiply(
                        x, rows.stride, rows.indices, unpacked, panel_stride(x_kind), some,
                        out + 4 * column, out_stride, num_rows, begin, correction, x_kind, x_kind,
                        rows.order,
                    )  # fmt: skip
            else:
                multiply(
                    x, rows.stride, rows.indices, w, w_stride, some, out + 4 * column, out_stride,
                    num_rows, begin, correction, kind, x_kind, rows.order,
                )  # fmt: skip
        column += width


@compiled
def product(rows, num_rows, weights, columns, num_columns, out, out_stride):
    """Multiplies some rows with one chunk of columns.

    Args:
        rows: the `Rows`; the first `num_rows` are used.
        weights: the `Weights`.
        columns: the first column of the chunk.
        out, out_stride: row i's products lie at ``out + i * out_stride + 4 * column``.
    """
    if num_columns >= TILE_COLUMNS and num_rows <= FEW_ROWS:
        _product(
            rows, num_rows, weights, columns, num_columns, out, out_stride, _multiply_few_rows,
            TILE_COLUMNS,
        )  # fmt: skip
    elif num_columns >= TILE_COLUMNS:
        _product(
            rows, num_rows, weights, columns, num_columns, out, out_stride, _multiply_tiles,
            TILE_COLUMNS,
        )  # fmt: skip
    else:
        _product(
            rows, num_rows, weights, columns, num_columns, out, out_stride, _multiply_column, 1
        )
    scale_at = corrections_at(weights.k) + 4 * num_parts(weights.k)
    scales = rows.address + scale_at if rows.kind == "int8" else 0
    if has_column_scales(weights.kind) or weights.bias != 0:
        finish(scales, rows.stride, out, out_stride, num_rows, columns, num_columns, weights)


@compiled
def width_in(tile_columns, most, num_columns, num_threads):
    """Returns the number of columns in a piece of work, at most `most` and whole tiles; the last
    piece has the rest, too."""
    width = min(most, num_columns // (CHUNKS_PER_THREAD * num_threads))
    return min(max(width // tile_columns, 1) * tile_columns, num_columns)


@compiled
def chunk_width(num_columns, num_threads):
    """Returns the number of columns in a piece of work; see `width_in`."""
    return width_in(TILE_COLUMNS, COLUMNS_AT_ONCE, num_columns, num_threads)


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_rows, num_columns = word(word(operands, 0), 0), word(operands, 6)
    num_chunks = num_columns // chunk_width(num_columns, num_threads)
    return (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * num_chunks


@compiled
def _multiply(operands, piece, thread, num_threads, x_kind, kind, bias_kind):
    num_rows = word(word(operands, 0), 0)
    x, x_stride, out, out_stride = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    weight, num_columns, k = word(operands, 5), word(operands, 6), word(operands, 7)
    scale, bias = word(operands, 8), word(operands, 9)
    width = chunk_width(num_columns, num_threads)
    num_chunks = num_columns // width
    first_row = piece // num_chunks * ROWS_AT_ONCE
    rows = min(ROWS_AT_ONCE, num_rows - first_row)
    chunk = piece % num_chunks
    columns = chunk * width
    chunk_columns = num_columns - columns if chunk == num_chunks - 1 else width
    product(
        Rows(x + first_row * x_stride, x_stride, 0, x_kind, IN_ORDER), rows,
        Weights(weight, k, scale, bias, kind, bias_kind), columns, chunk_columns,
        out + first_row * out_stride, out_stride,
    )  # fmt: skip


DTYPES = ("float32", "float16", "bfloat16")
KINDS = [
    *(("float32", kind, dtype) for dtype in DTYPES for kind in (dtype, *PACKINGS)),
    ("bfloat16", "bfloat16", "bfloat16"),
    *(("bfloat16", kind, dtype) for dtype in DTYPES for kind in PACKINGS),
    *(("int8", "int8", dtype) for dtype in DTYPES),
]
"""The dtype names of activations, weights and bias that products have kernels for."""

MULTIPLY = {kinds: Kernel(_pieces, _multiply, *kinds) for kinds in KINDS}
"""Kernels by the dtype names of x, weights and bias. ``out = x @ weight.T + bias``; out is float32.
Activations in bfloat16 need `arithmetic.HAS_BFLOAT16`, and those in int8 `HAS_INT8`;
`rounding.ROUND` makes them. Sums of int8 are exact over DEPTH_AT_ONCE elements.

Operands: address of the number of rows; x, its stride; out, its stride; weight [columns, k]
contiguous, columns, k; scale or 0, see `Weights`; bias [columns] or 0.
Tensors are given by their addresses, strides in bytes.

2 * columns * k flops for each row; all weights are read once for every ROWS_AT_ONCE rows.
"""
