"""Matrix products of packed weights with activations in 8 or 16 bits by groups.

For each group of activations, ``total = x @ codes`` is an exact int32. In float32, in the order of
the groups, a column then adds ``total * (scale of weights * scale of x)`` and, if its weights have
offsets, ``offset * (scale of x * sum of x)``, each by a fused multiply-add. The result depends on
nothing else: neither on the batch nor on tiles.

`group_rounding` rounds activations, `group_panels` places weights, `group_tiles` emits the code,
`group_arithmetic` has the instructions.
"""

from __future__ import annotations

from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.group_panels import (
    PANEL_BYTES,
    PANEL_COLUMNS,
    PANEL_DEPTH,
    place_codes,
    place_parameters,
)
from shmllm_kernels.cpu.group_rounding import GROUPINGS, integers_bytes, numbers_bytes
from shmllm_kernels.cpu.group_tiles import (
    HAS_EIGHT_ROWS,
    eight_rows_tile,
    four_rows_tile,
    has_words,
    one_row_tile,
    row_pairs_tile,
    row_tile,
    two_rows_tile,
)
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_noinline
from shmllm_kernels.cpu.memory import on_stack, word
from shmllm_kernels.cpu.product_tiles import IN_ORDER
from shmllm_kernels.cpu.products import DTYPES, ROWS_AT_ONCE, Rows, Weights, finish, width_in
from shmllm_kernels.cpu.unpacking import MAX_DEPTH, PACKINGS, row_bytes, scale_bytes

COLUMNS_AT_ONCE = 16 * PANEL_COLUMNS
"""The largest number of columns in one piece of work."""


@compiled
def _multiply_rows(
    tile, tile_rows, row, x, x_stride, indices, scales_at, size, first_run, num_runs, panel, ahead,
    stride, out, out_stride, num_rows, num_columns, kind, x_kind, order,
):  # fmt: skip
    """Multiplies the rows from `row` on by a tile of so many; returns the first one left."""
    while row + tile_rows <= num_rows:
        tile(
            x, x_stride, indices, row, scales_at, size, first_run, num_runs, panel, ahead, stride,
            out + row * out_stride, out_stride, num_columns, kind, x_kind, order,
        )  # fmt: skip
        row += tile_rows
    return row


@compiled_noinline
def _multiply_panel(
    x, x_stride, indices, scales_at, size, first_run, num_runs, panel, ahead, stride, out,
    out_stride, num_rows, num_columns, kind, x_kind, order,
):  # fmt: skip
    """Multiplies all rows with a panel. ahead, stride: columns to prefetch."""
    row = 0
    if HAS_EIGHT_ROWS:
        row = _multiply_rows(
            eight_rows_tile, 8, row, x, x_stride, indices, scales_at, size, first_run, num_runs,
            panel, ahead, stride, out, out_stride, num_rows, num_columns, kind, x_kind, order,
        )  # fmt: skip
    row = _multiply_rows(
        four_rows_tile, 4, row, x, x_stride, indices, scales_at, size, first_run, num_runs, panel,
        ahead, stride, out, out_stride, num_rows, num_columns, kind, x_kind, order,
    )  # fmt: skip
    row = _multiply_rows(
        two_rows_tile, 2, row, x, x_stride, indices, scales_at, size, first_run, num_runs, panel,
        ahead, stride, out, out_stride, num_rows, num_columns, kind, x_kind, order,
    )  # fmt: skip
    row = _multiply_rows(
        one_row_tile, 1, row, x, x_stride, indices, scales_at, size, first_run, num_runs, panel,
        ahead, stride, out, out_stride, num_rows, num_columns, kind, x_kind, order,
    )  # fmt: skip


@compiled
def _multiply_row(
    x, scales_at, size, first_run, num_runs, codes, stride, panel, out, num_columns, kind, x_kind,
):  # fmt: skip
    pairs = 0
    if has_words(kind):
        pairs = num_runs // 2 * 2
        if pairs > 0:
            row_pairs_tile(
                x, scales_at, size, first_run, 0, pairs, codes, stride, panel, out, num_columns,
                kind, x_kind,
            )  # fmt: skip
    if pairs < num_runs:
        row_tile(
            x, scales_at, size, first_run, pairs, num_runs, codes, stride, panel, out, num_columns,
            kind, x_kind,
        )  # fmt: skip


@compiled
def _first_row(rows):
    """Returns the address of the first row."""
    place = 0 if rows.order == IN_ORDER else word(rows.indices, 0)
    return rows.address + place * rows.stride


@compiled
def product(rows, num_rows, weights, columns, num_columns, out, out_stride):
    """As `products.product`, of rows as `group_rounding.ROUND` writes them. rows.kind: a key of
    `group_rounding.GROUPINGS`."""
    k, kind, x_kind = weights.k, weights.kind, rows.kind
    w_stride, scale_stride = row_bytes(k, kind), scale_bytes(k, kind)
    panel, numbers_at, size = (
        on_stack(PANEL_BYTES), integers_bytes(k, x_kind), numbers_bytes(k, x_kind),
    )  # fmt: skip
    end = columns + num_columns
    depth = MAX_DEPTH if num_rows == 1 else PANEL_DEPTH  # one row needs no codes in the panel
    for column in range(columns, end, PANEL_COLUMNS):
        width, to = min(PANEL_COLUMNS, end - column), out + 4 * column
        for begin in range(0, k, depth):
            first_run, num_runs = begin // RUN, (min(depth, k - begin) + RUN - 1) // RUN
            codes = weights.address + column * w_stride + row_bytes(begin, kind)
            scales = weights.scale + column * scale_stride + scale_bytes(begin, kind)
            place_parameters(scales, scale_stride, width, num_runs, panel, kind)
            if num_rows == 1:
                _multiply_row(
                    _first_row(rows), numbers_at, size, first_run, num_runs, codes, w_stride,
                    panel, to, width, kind, x_kind,
                )  # fmt: skip
            else:
                place_codes(codes, w_stride, width, num_runs, panel, kind)
                _multiply_panel(
                    rows.address, rows.stride, rows.indices, numbers_at, size, first_run,
                    num_runs, panel, codes + PANEL_COLUMNS * w_stride, w_stride, to, out_stride,
                    num_rows, width, kind, x_kind, rows.order,
                )  # fmt: skip
    if weights.bias != 0:
        finish(0, 0, out, out_stride, num_rows, columns, num_columns, weights)


@compiled
def _chunk_width(num_columns, num_threads):
    """Returns the number of columns in a piece of work; see `products.width_in`."""
    return width_in(PANEL_COLUMNS, COLUMNS_AT_ONCE, num_columns, num_threads)


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_rows, num_columns = word(word(operands, 0), 0), word(operands, 6)
    num_chunks = num_columns // _chunk_width(num_columns, num_threads)
    return (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * num_chunks


@compiled
def _multiply(operands, piece, thread, num_threads, x_kind, kind, bias_kind):
    x_stride, out_stride = word(operands, 2), word(operands, 4)
    num_columns, k = word(operands, 6), word(operands, 7)
    width = _chunk_width(num_columns, num_threads)
    num_chunks = num_columns // width
    row, chunk = piece // num_chunks * ROWS_AT_ONCE, piece % num_chunks
    columns = chunk * width
    product(
        Rows(word(operands, 1) + row * x_stride, x_stride, 0, x_kind, IN_ORDER),
        min(ROWS_AT_ONCE, word(word(operands, 0), 0) - row),
        Weights(word(operands, 5), k, word(operands, 8), word(operands, 9), kind, bias_kind),
        columns, num_columns - columns if chunk == num_chunks - 1 else width,
        word(operands, 3) + row * out_stride, out_stride,
    )  # fmt: skip


X_KINDS = {
    (grouping.dtype, kind): x_kind
    for x_kind, grouping in GROUPINGS.items()
    for kind, packing in PACKINGS.items()
    if packing.codes.bytes is not None and packing.num_scales
    if packing.group == grouping.size or packing.group > grouping.size == 32
}
"""The name of the activations, a key of `group_rounding.GROUPINGS`, by their dtype name and the
kind of the weights."""

KINDS = [(x_kind, kind, dtype) for (_, kind), x_kind in X_KINDS.items() for dtype in DTYPES]
"""As `products.KINDS`, with a name in `group_rounding.GROUPINGS` in place of the activations' dtype
name."""

MULTIPLY = {kinds: Kernel(_pieces, _multiply, *kinds) for kinds in KINDS}
"""As `products.MULTIPLY`, for a process that has `arithmetic.HAS_INT8`; x is what
`group_rounding.ROUND` wrote. All weights are read once for every ROWS_AT_ONCE rows."""
