"""Matrix products by tile instructions.

The kernels have the operands of `products.MULTIPLY`, and int8 gives the same bits as there. A tile
of weights has 16 rows of the matrix as it is stored, 64 bytes of each; `tile_rounding` has the
layout of activations. The sums are the transpose of the result: a line for each row of weights.

A product reads rows of activations that nobody wrote, up to the end of the last block, and computes
with them: each column of a tile of sums depends on one row alone. A row's sums are added in the
order of k, in steps of 64 bytes and parts of `products.DEPTH_AT_ONCE`, so that they depend on the
operands alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import itemsize, on_stack, word
from shmllm_kernels.cpu.products import (
    KINDS,
    ROWS_AT_ONCE,
    Weights,
    finish,
    num_parts,
    part_depth,
    width_in,
)
from shmllm_kernels.cpu.tile_instructions import (
    AMX,
    LINE_BYTES,
    LINES,
    TILE_BYTES,
    W0,
    W0X0,
    W0X1,
    W1,
    W1X0,
    W1X1,
    X0,
    X1,
    add_line,
    configure,
    copy_line,
    transpose,
)
from shmllm_kernels.cpu.tile_rounding import (
    BLOCK_ROWS,
    WORD_BYTES,
    line_bytes,
    padded_bytes,
    tiled,
)
from shmllm_kernels.cpu.unpacking import (
    has_column_scales,
    is_unpacked,
    panel,
    panel_stride,
    part_step,
    row_bytes,
    scale_bytes,
    unpack,
)

COLUMNS_AT_ONCE = 8 * LINES
"""The largest number of columns in one piece of work, but for the last one."""


class Job(NamedTuple):
    """What all tiles of a piece of work have in common.

    tiles: the instructions.
    kind: the dtype name of activations, and of weights as tiles load them.
    stride: the bytes from one row of such weights to the next.
    line, block: the sizes of a line and of a block of activations.
    out_stride: the stride of the result.
    columns: the number of columns of a tile of weights.
    scratch: memory for four tiles of sums, and after them for the `tail` of two tiles of weights:
        the last bytes of their rows, filled with zeros to whole steps.
    """

    tiles: Any
    kind: str
    stride: Any
    line: Any
    block: Any
    out_stride: Any
    columns: Any
    scratch: Any
    tail: Any


@compiled
def _step(job, w, w_stride, x, num_w, num_x):
    """Adds the products over 64 bytes of each row of weights."""
    tiles, kind = job.tiles, job.kind
    tiles.load(W0, w, w_stride)
    tiles.load(X0, x, job.line)
    tiles.dot(kind, W0X0, W0, X0)
    if num_x == 2:
        tiles.load(X1, x + job.block, job.line)
        tiles.dot(kind, W0X1, W0, X1)
    if num_w == 2:
        tiles.load(W1, w + LINES * w_stride, w_stride)
        tiles.dot(kind, W1X0, W1, X0)
        if num_x == 2:
            tiles.dot(kind, W1X1, W1, X1)


@compiled
def _add_tile(job, tile, out, num_rows, adds):
    """Adds a tile of sums to the result, or stores it there if `adds` is 0."""
    sums = job.scratch + TILE_BYTES * tile
    job.tiles.store(tile, sums, LINE_BYTES)
    transpose(sums)
    for row in range(num_rows):
        add_line(sums + LINE_BYTES * row, out + row * job.out_stride, job.columns, adds, job.kind)


@compiled
def _multiply_blocks(job, w, num_bytes, x, out, num_rows, adds, num_w, num_x):
    """Multiplies `num_w` tiles of weights with `num_x` blocks, which have `num_rows` rows, over a
    part of k: `num_bytes` of each row of weights."""
    tiles, whole = job.tiles, num_bytes // LINE_BYTES * LINE_BYTES
    tiles.zero(W0X0)
    tiles.zero(W0X1)
    tiles.zero(W1X0)
    tiles.zero(W1X1)
    for at in range(0, whole, LINE_BYTES):
        _step(job, w + at, job.stride, x + (at >> 2) * job.line, num_w, num_x)
    if whole < num_bytes:
        _step(job, job.tail, LINE_BYTES, x + (whole >> 2) * job.line, num_w, num_x)
    rows, next_columns = min(num_rows, BLOCK_ROWS), out + 4 * job.columns
    _add_tile(job, W0X0, out, rows, adds)
    if num_w == 2:
        _add_tile(job, W1X0, next_columns, rows, adds)
    if num_x == 2:
        below = BLOCK_ROWS * job.out_stride
        _add_tile(job, W0X1, out + below, num_rows - BLOCK_ROWS, adds)
        if num_w == 2:
            _add_tile(job, W1X1, next_columns + below, num_rows - BLOCK_ROWS, adds)


@compiled
def _multiply_part(job, w, num_bytes, x, out, num_rows, adds, num_w):
    """Multiplies `num_w` tiles of weights with all rows of a piece, over a part of k."""
    rest = num_bytes % LINE_BYTES
    if rest != 0:
        for i in range(num_w * job.columns):
            copy_line(w + i * job.stride + num_bytes - rest, rest, job.tail + i * LINE_BYTES)
    row = 0
    while num_w == 2 and row + BLOCK_ROWS < num_rows:
        rows, at = min(num_rows - row, 2 * BLOCK_ROWS), out + row * job.out_stride
        _multiply_blocks(job, w, num_bytes, x, at, rows, adds, num_w, 2)
        x, row = x + 2 * job.block, row + 2 * BLOCK_ROWS
    while row < num_rows:
        rows, at = min(num_rows - row, BLOCK_ROWS), out + row * job.out_stride
        _multiply_blocks(job, w, num_bytes, x, at, rows, adds, num_w, 1)
        x, row = x + job.block, row + BLOCK_ROWS


def _step_of(kind: str, x_kind: str) -> int:
    """Returns the number of elements that parts of k have a multiple of."""
    return part_step(kind) if is_unpacked(kind, x_kind) else LINE_BYTES // itemsize(x_kind)


@compiled
def _multiply_columns(job, weights, first, end, x, out, num_rows, num_w):
    """Multiplies all rows of a piece with the columns [first, end), `num_w` tiles at a time."""
    k, kind, x_kind, width = weights.k, weights.kind, job.kind, num_w * job.columns
    depth, size = part_depth(k, _step_of(kind, x_kind)), itemsize(x_kind)
    w_stride, scale_stride = row_bytes(k, kind), scale_bytes(k, kind)
    unpacked = panel(num_w * LINES, kind, x_kind)
    column = first
    while column < end:
        column = min(column, end - width)  # the last tile overlaps the one before
        for part in range(num_parts(k)):
            begin = part * depth
            some = min(depth, k - begin)
            w = weights.address + column * w_stride + row_bytes(begin, kind)
            at, to = x + (begin * size >> 2) * job.line, out + 4 * column
            if is_unpacked(kind, x_kind):
                scale = weights.scale + column * scale_stride + scale_bytes(begin, kind)
                unpack(w, w_stride, scale, scale_stride, width, some, unpacked, kind, x_kind)
                _multiply_part(job, unpacked, some * size, at, to, num_rows, part, num_w)
            else:
                _multiply_part(job, w, some * size, at, to, num_rows, part, num_w)
        column += width


@compiled
def _finish(x, x_stride, job, out, num_rows, columns, num_columns, weights):
    """Applies scales and the bias to a chunk of columns, by blocks of rows."""
    scales_at = (padded_bytes(weights.k, job.kind) >> 2) * job.line
    for row in range(0, num_rows, BLOCK_ROWS):
        finish(
            x + row * x_stride + scales_at if job.kind == "int8" else 0, WORD_BYTES,
            out + row * job.out_stride, job.out_stride, min(num_rows - row, BLOCK_ROWS), columns,
            num_columns, weights,
        )  # fmt: skip


@compiled
def _chunk_width(num_columns, num_threads):
    """Returns the number of columns in a piece of work; see `products.width_in`."""
    return width_in(2 * LINES, COLUMNS_AT_ONCE, num_columns, num_threads)


@compiled
def count_pieces(operands, piece, thread, num_threads):
    """Returns the number of pieces of a product."""
    num_rows, num_columns = word(word(operands, 0), 0), word(operands, 6)
    num_chunks = num_columns // _chunk_width(num_columns, num_threads)
    return (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * num_chunks


@compiled
def multiply_by(tiles, operands, piece, num_threads, x_kind, kind, bias_kind):
    """Does one piece of a product with these instructions on tiles."""
    all_rows, x_stride, out_stride = (
        word(word(operands, 0), 0), word(operands, 2), word(operands, 4),
    )  # fmt: skip
    all_columns, k = word(operands, 6), word(operands, 7)
    weights = Weights(word(operands, 5), k, word(operands, 8), word(operands, 9), kind, bias_kind)
    width = _chunk_width(all_columns, num_threads)
    num_chunks = all_columns // width
    row, chunk = piece // num_chunks * ROWS_AT_ONCE, piece % num_chunks
    num_rows, columns = min(ROWS_AT_ONCE, all_rows - row), chunk * width
    end = all_columns if chunk == num_chunks - 1 else columns + width
    x, out = word(operands, 1) + row * x_stride, word(operands, 3) + row * out_stride
    scratch, tile_columns = on_stack(6 * TILE_BYTES), min(end - columns, LINES)
    job = Job(
        tiles, x_kind, panel_stride(x_kind) if is_unpacked(kind, x_kind) else row_bytes(k, kind),
        line_bytes(all_rows), BLOCK_ROWS * x_stride, out_stride, tile_columns, scratch,
        scratch + 4 * TILE_BYTES,
    )  # fmt: skip
    configure(tiles, scratch, tile_columns, min(all_rows, BLOCK_ROWS))
    if end - columns >= 2 * LINES:
        _multiply_columns(job, weights, columns, end, x, out, num_rows, 2)
    else:
        _multiply_columns(job, weights, columns, end, x, out, num_rows, 1)
    tiles.release()
    if has_column_scales(kind) or weights.bias != 0:
        _finish(x, x_stride, job, out, num_rows, columns, end - columns, weights)


@compiled
def _multiply(operands, piece, thread, num_threads, x_kind, kind, bias_kind):
    multiply_by(AMX, operands, piece, num_threads, x_kind, kind, bias_kind)


MULTIPLY = {
    (tiled(kinds[0]), *kinds[1:]): Kernel(count_pieces, _multiply, *kinds)
    for kinds in KINDS
    if kinds[0] != "float32"
}
"""As `products.MULTIPLY`, for a process that has `amx.HAS_AMX`; x is what `tile_rounding.ROUND`
wrote for the same number of rows. AMX takes subnormal numbers for zero, in operands and sums."""
