"""The core of products by tile instructions: tiles of weights times the rows of a piece of work.

A tile of weights has 16 rows of the matrix as it is stored, 64 bytes of each; `tile_rounding` has
the layout of activations. The sums are the transpose of the result: a line for each row of weights.
This module owns the order of tiles, and must not know what becomes of sums: `Job.put` does it.

A product reads rows of activations that nobody wrote, up to the end of the last block, and computes
with them: each column of a tile of sums depends on one row alone. A row's sums are added in the
order of k, in steps of 64 bytes, so that they depend on the operands alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import itemsize, on_stack
from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from shmllm_kernels.cpu.tile_instructions import (
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
    prefetch_lines,
)
from shmllm_kernels.cpu.tile_panels import (
    PANEL_STRIDE,
    PART_BYTES,
    Stored,
    place_in_panel,
    unpack_ahead,
    widen_columns,
)
from shmllm_kernels.cpu.tile_rounding import BLOCK_ROWS, digit, line_bytes, num_digits
from shmllm_kernels.cpu.unpacking import (
    MAX_DEPTH,
    SCALES_BYTES,
    is_unpacked,
    row_bytes,
    run_scales_bytes,
)

SUMS_BYTES = 4 * TILE_BYTES
"""The size of the sums of two tiles of weights and two blocks, or one of two digits."""


class Job(NamedTuple):
    """What all tiles of a piece of work have in common. Sizes and strides are in bytes.

    tiles: the instructions.
    put: (job, weights, column, sums, out, num_rows, num_w, num_x); makes results of the sums of
        `num_w` tiles of weights, whose first column is given, and one or two blocks. out: the
        address of the first row's results, those of column 0.
    activation: the name of the activation that `put` computes, or "".
    kind: the dtype name of activations; weights as tiles load them have its `digit`.
    stride: from one row of such weights to the next.
    apart: the columns from the first one of a tile of weights to that of the other, if there are
        two; 0: the other follows it.
    second: likewise, the bytes between their weights as tiles load them.
    line, block: the sizes of a line and of a block of activations.
    out_stride: from one row of the result to the next.
    columns: the number of columns of a tile of weights.
    sums: memory for the four tiles of sums of each two blocks of a piece's rows, TILE_BYTES apart.
        Their lines have the size of those of activations.
    tail: memory for the last bytes of the rows of two tiles, filled with zeros to a whole step.
    """

    tiles: Any
    put: Any
    activation: str
    kind: str
    stride: Any
    apart: Any
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
    """

    num_bytes: Any
    is_first: Any
    is_last: Any


@compiled
def begin(tiles, put, activation, weights, x_kind, apart, columns, num_rows, x_stride, out_stride):
    """Configures the tiles, and returns the `Job` of a piece of work.

    Args:
        weights: the `products.Weights`.
        columns: the number of columns of a tile.
        num_rows: the number of rows of the whole product.
        x_stride: the bytes from one row of activations to the next.
        tiles, put, activation, x_kind, apart, out_stride: see `Job`.
    """
    num_sums = ROWS_AT_ONCE // (2 * BLOCK_ROWS) * num_digits(x_kind)
    sums, tail = on_stack(num_sums * SUMS_BYTES), on_stack(2 * TILE_BYTES)
    configure(tiles, sums, columns, min(num_rows, BLOCK_ROWS))
    line, block = line_bytes(num_rows), BLOCK_ROWS * x_stride
    if is_unpacked(weights.kind, x_kind):
        stride, second = PANEL_STRIDE, columns * PANEL_STRIDE
    else:
        stride = row_bytes(weights.k, weights.kind)
        second = max(apart, columns) * stride
    return Job(
        tiles, put, activation, x_kind, stride, apart, second, line, block, out_stride, columns,
        sums, tail,
    )  # fmt: skip


@compiled
def _step(job, w, second, w_stride, x, num_w, num_x):
    """Adds the products over 64 bytes of each row of weights. Activations of two digits take the
    place of two blocks."""
    tiles, kind = job.tiles, digit(job.kind)
    tiles.load(X0, x, job.line)
    tiles.load(W0, w, w_stride)
    tiles.dot(kind, W0X0, W0, X0)
    if num_x == 2:
        other = LINES * job.line if num_digits(job.kind) == 2 else job.block
        tiles.load(X1, x + other, job.line)
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
        job.tiles.load(W0X0, sums + TILE_BYTES * W0X0, job.line)
        if num_x == 2:
            job.tiles.load(W0X1, sums + TILE_BYTES * W0X1, job.line)
        if num_w == 2:
            job.tiles.load(W1X0, sums + TILE_BYTES * W1X0, job.line)
            if num_x == 2:
                job.tiles.load(W1X1, sums + TILE_BYTES * W1X1, job.line)


@compiled
def _place(job, stored, at):
    """Returns where tiles find a byte of a part's rows."""
    return place_in_panel(at) if is_unpacked(stored.kind, job.kind) else at


@compiled
def _look_ahead(job, stored, w, part, at, num_w, ahead, num_ahead, begins):
    """Brings near what is multiplied behind a byte of a part; see `_multiply_blocks`."""
    if is_unpacked(stored.kind, job.kind):
        if begins:
            unpack_ahead(job, stored, at, part.num_bytes, w, num_w)
    else:
        prefetch_lines(ahead + at, job.stride)
        if num_ahead == 2:
            prefetch_lines(ahead + job.second + at, job.stride)


@compiled
def _multiply_blocks(job, stored, w, part, x, sums, num_w, num_x, ahead, num_ahead, begins):
    """Multiplies `num_w` tiles of weights with `num_x` blocks, over a part of k.

    Args:
        stored: the `Stored` columns.
        w: the address of the rows that tiles load: the same, or the panel of packed weights.
        ahead, num_ahead: the address of one or two further tiles, which are prefetched unless
            weights are packed.
        begins: whether the blocks are the first ones: they have the panel and the tails filled.
    """
    tiles, whole = job.tiles, part.num_bytes // LINE_BYTES * LINE_BYTES
    words = job.line * num_digits(job.kind)
    _begin(job, sums, part.is_first, num_w, num_x)
    for at in range(0, whole, LINE_BYTES):
        _look_ahead(job, stored, w, part, at, num_w, ahead, num_ahead, begins)
        place = w + _place(job, stored, at)
        _step(job, place, job.second, job.stride, x + (at >> 2) * words, num_w, num_x)
    if whole < part.num_bytes:
        if begins:
            if whole == 0:
                _look_ahead(job, stored, w, part, 0, num_w, ahead, num_ahead, begins)
            _fill_tails(job, w + _place(job, stored, whole), part.num_bytes - whole, num_w)
        _step(job, job.tail, TILE_BYTES, LINE_BYTES, x + (whole >> 2) * words, num_w, num_x)
    tiles.store(W0X0, sums + TILE_BYTES * W0X0, job.line)
    if num_x == 2:
        tiles.store(W0X1, sums + TILE_BYTES * W0X1, job.line)
    if num_w == 2:
        tiles.store(W1X0, sums + TILE_BYTES * W1X0, job.line)
        if num_x == 2:
            tiles.store(W1X1, sums + TILE_BYTES * W1X1, job.line)


@compiled
def _fill_tails(job, w, rest, num_w):
    """Copies the last `rest` bytes of rows of weights, which begin at w."""
    for i in range(job.columns):
        copy_line(w + i * job.stride, rest, job.tail + i * LINE_BYTES)
        if num_w == 2:
            second = w + job.second + i * job.stride
            copy_line(second, rest, job.tail + TILE_BYTES + i * LINE_BYTES)


@compiled
def _multiply_part(job, stored, w, part, weights, column, x, out, num_rows, num_w):
    """Multiplies `num_w` tiles of weights with all rows of a piece, over a part of k, and
    prefetches others. stored, w: see `_multiply_blocks`."""
    row, sums, at_once, ahead = 0, job.sums, 2 * BLOCK_ROWS // num_digits(job.kind), stored.ahead
    while row < num_rows:
        rows, to, begins = min(num_rows - row, at_once), out + row * job.out_stride, row == 0
        if rows <= BLOCK_ROWS and num_digits(job.kind) == 1:
            _multiply_blocks(job, stored, w, part, x, sums, num_w, 1, ahead, num_w, begins)
            if part.is_last:
                job.put(job, weights, column, sums, to, rows, num_w, 1)
        else:
            if num_rows <= at_once:
                _multiply_blocks(job, stored, w, part, x, sums, num_w, 2, ahead, num_w, begins)
            else:  # the first two blocks prefetch one tile, the next two the other
                _multiply_blocks(job, stored, w, part, x, sums, num_w, 2, ahead, 1, begins)
            ahead = ahead + job.second if row == 0 else w
            if part.is_last:
                job.put(job, weights, column, sums, to, rows, num_w, 2)
        x, row, sums = x + at_once // BLOCK_ROWS * job.block, row + at_once, sums + SUMS_BYTES


class Columns(NamedTuple):
    """The columns [first, end) of a piece of work, and the first one of the piece that its thread
    most likely does next, since threads take pieces in turns; the same one if there is none."""

    first: Any
    end: Any
    following: Any


@compiled
def columns_of(chunk, width, num_columns, num_threads, has_more):
    """Returns the `Columns` of a chunk: `width` columns, and the rest for the last chunk. has_more:
    whether the chunks of further rows follow."""
    num_chunks, after = num_columns // width, chunk + num_threads
    following = after % num_chunks if has_more | (after < num_chunks) else chunk
    end = num_columns if chunk == num_chunks - 1 else (chunk + 1) * width
    return Columns(chunk * width, end, following * width)


@compiled
def count_pieces_of(num_rows, width, num_columns):
    """Returns the number of pieces of a product: chunks of columns for ROWS_AT_ONCE rows each."""
    return (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * (num_columns // width)


@compiled
def _multiply_packed(job, weights, column, following, x, out, num_rows, num_w):
    """As `multiply_tiles`, of packed weights."""
    k, kind, size = weights.k, weights.kind, itemsize(digit(job.kind))
    stride = row_bytes(k, kind)
    first_column, ahead = weights.address + column * stride, weights.address + following * stride
    panel, scales = on_stack(num_w * LINES * PANEL_STRIDE), on_stack(num_w * LINES * SCALES_BYTES)
    for first in range(0, k, MAX_DEPTH):
        end = min(first + MAX_DEPTH, k)
        widen_columns(job, weights, column, following, first, end - first, scales, num_w)
        depth = MAX_DEPTH if num_rows <= 2 * BLOCK_ROWS else PART_BYTES // size
        for begin in range(first, end, depth):
            some, codes = min(depth, end - begin), row_bytes(begin, kind)
            own = scales + (begin - first) // RUN * run_scales_bytes(kind)
            _multiply_part(
                job, Stored(first_column + codes, ahead + codes, stride, own, kind), panel,
                Part(some * size, begin == 0, begin + some == k), weights, column,
                x + (begin * size >> 2) * (job.line * num_digits(job.kind)), out, num_rows, num_w,
            )  # fmt: skip


@compiled
def multiply_tiles(job, weights, column, following, x, out, num_rows, num_w):
    """Multiplies all rows of a piece with `num_w` tiles of weights.

    Several blocks multiply a part of k after the other, which stays in the L1 cache. The sums wait
    in memory meanwhile: they have the same bits. So do packed weights, which are unpacked there.

    Args:
        job: the `Job`.
        weights: the `products.Weights`.
        column: the first column of the first tile.
        following: that of the tiles that this thread multiplies next, which are prefetched.
        x: the address of the first row's block.
        out: see `Job.put`.
    """
    k, kind, words = weights.k, weights.kind, job.line * num_digits(job.kind)
    if is_unpacked(kind, job.kind):
        _multiply_packed(job, weights, column, following, x, out, num_rows, num_w)
    else:
        w, num_bytes = weights.address + column * row_bytes(k, kind), k * itemsize(digit(job.kind))
        ahead = weights.address + following * row_bytes(k, kind)
        depth = num_bytes if num_rows <= 2 * BLOCK_ROWS else PART_BYTES
        for first in range(0, num_bytes, depth):
            some = min(depth, num_bytes - first)
            _multiply_part(
                job, Stored(w + first, ahead + first, job.stride, 0, kind), w + first,
                Part(some, first == 0, first + some == num_bytes), weights, column,
                x + (first >> 2) * words, out, num_rows, num_w,
            )  # fmt: skip
