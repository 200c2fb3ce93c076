"""Matrix products by tile instructions.

The kernels have the operands of `products.MULTIPLY`. A tile of weights has 16 rows of the matrix as
it is stored, 64 bytes of each; `tile_rounding` has the layout of activations. The sums are the
transpose of the result: a line for each row of weights.

A product reads rows of activations that nobody wrote, up to the end of the last block, and computes
with them: each column of a tile of sums depends on one row alone. A row's sums are added in the
order of k, in steps of 64 bytes, so that they depend on the operands alone.
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
    configure,
    copy_line,
    prefetch_rows,
    put_tile,
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

SUMS_BYTES = 4 * TILE_BYTES
"""The size of the sums of two tiles of weights and two blocks."""

COLUMNS_AT_ONCE = 8 * LINES
"""The largest number of columns in one piece of work, but for the last one."""


class Job(NamedTuple):
    """What all tiles of a piece of work have in common. Sizes and strides are in bytes.

    tiles: the instructions.
    kind: the dtype name of activations, and of weights as tiles load them.
    stride: from one row of such weights to the next.
    second: from the first row of a tile of weights to that of the other, if there are two.
    line, block: the sizes of a line and of a block of activations.
    out_stride: from one row of the result to the next.
    columns: the number of columns of a tile of weights.
    sums: memory for the four tiles of sums of each two blocks of a piece's rows.
    tail: memory for the last bytes of the rows of two tiles, filled with zeros to a whole step.
    """

    tiles: Any
    kind: str
    stride: Any
    second: Any
    line: Any
    block: Any
    out_stride: Any
    columns: Any
    sums: Any
    tail: Any


class Part(NamedTuple):
    """A part of k.

    num_bytes: its size in each row of weights.
    is_first, is_last: its place.
    is_packed: whether the weights are a panel of unpacked ones, which lies in a cache.
    sums_stride: the bytes from the sums of two blocks to those of the next, 0 if they need not be
        kept for further parts.
    """

    num_bytes: Any
    is_first: Any
    is_last: Any
    is_packed: bool
    sums_stride: Any


@compiled
def _step(job, w, second, w_stride, x, num_w, num_x):
    """Adds the products over 64 bytes of each row of weights."""
    tiles, kind = job.tiles, job.kind
    tiles.load(X0, x, job.line)
    tiles.load(W0, w, w_stride)
    tiles.dot(kind, W0X0, W0, X0)
    if num_x == 2:
        tiles.load(X1, x + job.block, job.line)
        tiles.dot(kind, W0X1, W0, X1)
    if num_w == 2:
        tiles.load(W1, w + second, w_stride)
        tiles.dot(kind, W1X0, W1, X0)
        if num_x == 2:
            tiles.dot(kind, W1X1, W1, X1)


@compiled
def _begin(job, sums, is_first, num_w, num_x):
    """Clears the sums, or loads those over the parts of k before this one."""
    if is_first:
        job.tiles.zero(W0X0)
        job.tiles.zero(W0X1)
        job.tiles.zero(W1X0)
        job.tiles.zero(W1X1)
    else:
        job.tiles.load(W0X0, sums + TILE_BYTES * W0X0, LINE_BYTES)
        if num_x == 2:
            job.tiles.load(W0X1, sums + TILE_BYTES * W0X1, LINE_BYTES)
        if num_w == 2:
            job.tiles.load(W1X0, sums + TILE_BYTES * W1X0, LINE_BYTES)
            if num_x == 2:
                job.tiles.load(W1X1, sums + TILE_BYTES * W1X1, LINE_BYTES)


@compiled
def _multiply_blocks(job, w, part, x, sums, num_w, num_x, ahead, num_ahead):
    """Multiplies `num_w` tiles of weights with `num_x` blocks, over a part of k. ahead, num_ahead:
    the address of rows of weights to prefetch; their number."""
    tiles, whole = job.tiles, part.num_bytes // LINE_BYTES * LINE_BYTES
    _begin(job, sums, part.is_first, num_w, num_x)
    for at in range(0, whole, LINE_BYTES):
        prefetch_rows(ahead + at, job.stride, num_ahead)
        _step(job, w + at, job.second, job.stride, x + (at >> 2) * job.line, num_w, num_x)
    if whole < part.num_bytes:
        at = x + (whole >> 2) * job.line
        _step(job, job.tail, TILE_BYTES, LINE_BYTES, at, num_w, num_x)
    tiles.store(W0X0, sums + TILE_BYTES * W0X0, LINE_BYTES)
    if num_x == 2:
        tiles.store(W0X1, sums + TILE_BYTES * W0X1, LINE_BYTES)
    if num_w == 2:
        tiles.store(W1X0, sums + TILE_BYTES * W1X0, LINE_BYTES)
        if num_x == 2:
            tiles.store(W1X1, sums + TILE_BYTES * W1X1, LINE_BYTES)


@compiled
def _put_blocks(job, sums, out, num_rows, num_w, num_x):
    """Writes the sums of one or two blocks to the result."""
    rows, stride, columns, kind = min(num_rows, BLOCK_ROWS), job.out_stride, job.columns, job.kind
    put_tile(sums + TILE_BYTES * W0X0, out, stride, rows, columns, kind)
    if num_w == 2:
        put_tile(sums + TILE_BYTES * W1X0, out + 4 * columns, stride, rows, columns, kind)
    if num_x == 2:
        below, rest = out + BLOCK_ROWS * stride, num_rows - BLOCK_ROWS
        put_tile(sums + TILE_BYTES * W0X1, below, stride, rest, columns, kind)
        if num_w == 2:
            put_tile(sums + TILE_BYTES * W1X1, below + 4 * columns, stride, rest, columns, kind)


@compiled
def _fill_tails(job, w, num_bytes, num_w):
    """Copies what is left of the rows of weights after whole steps."""
    rest = num_bytes % LINE_BYTES
    if rest != 0:
        for i in range(job.columns):
            copy_line(w + i * job.stride + num_bytes - rest, rest, job.tail + i * LINE_BYTES)
            if num_w == 2:
                second = w + job.second + i * job.stride + num_bytes - rest
                copy_line(second, rest, job.tail + TILE_BYTES + i * LINE_BYTES)


@compiled
def _multiply_part(job, w, part, x, out, num_rows, num_w):
    """Multiplies `num_w` tiles of weights with all rows of a piece, over a part of k."""
    _fill_tails(job, w, part.num_bytes, num_w)
    row, sums, ahead = 0, job.sums, w + num_w * job.columns * job.stride
    while row < num_rows:
        rows, at = min(num_rows - row, 2 * BLOCK_ROWS), out + row * job.out_stride
        if rows > BLOCK_ROWS:
            if part.is_packed:
                _multiply_blocks(job, w, part, x, sums, num_w, 2, ahead, 0)
            elif num_rows <= 2 * BLOCK_ROWS:
                _multiply_blocks(job, w, part, x, sums, num_w, 2, ahead, num_w * LINES)
            else:
                _multiply_blocks(job, w, part, x, sums, num_w, 2, ahead, LINES)
            ahead = ahead + LINES * job.stride if row == 0 else w
            if part.is_last:
                _put_blocks(job, sums, at, rows, num_w, 2)
        else:
            if part.is_packed:
                _multiply_blocks(job, w, part, x, sums, num_w, 1, ahead, 0)
            else:
                _multiply_blocks(job, w, part, x, sums, num_w, 1, ahead, num_w * LINES)
            if part.is_last:
                _put_blocks(job, sums, at, rows, num_w, 1)
        x, row, sums = x + 2 * job.block, row + 2 * BLOCK_ROWS, sums + part.sums_stride


@compiled
def _multiply_columns(job, weights, first, end, x, out, num_rows, num_w):
    """Multiplies all rows of a piece with the columns [first, end), `num_w` tiles at a time."""
    k, kind, x_kind, width = weights.k, weights.kind, job.kind, num_w * job.columns
    w_stride, column = row_bytes(k, kind), first
    while column < end:
        column = min(column, end - width)  # the last tile overlaps the one before
        w, to = weights.address + column * w_stride, out + 4 * column
        if is_unpacked(kind, x_kind):
            _multiply_packed(job, weights, column, w, x, to, num_rows, num_w)
        else:
            part = Part(k * itemsize(x_kind), True, True, False, 0)
            _multiply_part(job, w, part, x, to, num_rows, num_w)
        column += width


@compiled
def _multiply_packed(job, weights, column, w, x, out, num_rows, num_w):
    """Multiplies all rows of a piece with `num_w` tiles of packed weights, a part of k after the
    other: their panel stays in the L1 cache."""
    k, kind, x_kind, width = weights.k, weights.kind, job.kind, num_w * job.columns
    stride, scale_stride = row_bytes(k, kind), scale_bytes(k, kind)
    depth, size = part_depth(k, part_step(kind)), itemsize(x_kind)
    unpacked = panel(num_w * LINES, kind, x_kind)
    for index in range(num_parts(k)):
        begin = index * depth
        some = min(depth, k - begin)
        scale = weights.scale + column * scale_stride + scale_bytes(begin, kind)
        unpack(
            w + row_bytes(begin, kind), stride, scale, scale_stride, width, some, unpacked, kind,
            x_kind,
        )  # fmt: skip
        part = Part(some * size, index == 0, begin + some == k, True, SUMS_BYTES)
        at = x + (begin * size >> 2) * job.line
        _multiply_part(job, unpacked, part, at, out, num_rows, num_w)


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
    tile_columns = min(end - columns, LINES)
    sums, tail = on_stack(ROWS_AT_ONCE // (2 * BLOCK_ROWS) * SUMS_BYTES), on_stack(2 * TILE_BYTES)
    stride = panel_stride(x_kind) if is_unpacked(kind, x_kind) else row_bytes(k, kind)
    job = Job(
        tiles, x_kind, stride, tile_columns * stride, line_bytes(all_rows), BLOCK_ROWS * x_stride,
        out_stride, tile_columns, sums, tail,
    )  # fmt: skip
    configure(tiles, sums, tile_columns, min(all_rows, BLOCK_ROWS))
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
