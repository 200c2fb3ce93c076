"""Matrix products of activations with weights in the layout of checkpoints.

``out[m, n] = sum over k of x[m, k] * weight[n, k]``: both operands are read along their rows, so
weights need no packed copy. Every element is summed in the same order, for any number of rows and
in any tile: results do not depend on the batch, to the last bit.

The tile's shape follows Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008): the accumulators fill the vector registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_noinline, emitted
from shmllm_kernels.cpu.memory import floats, itemsize, number, word
from shmllm_kernels.cpu.simd import LANES, STORED, Emitter, Loop

TILE_ROWS, TILE_COLUMNS = {16: (4, 6), 8: (2, 4), 4: (6, 4)}[LANES]
ROWS_AT_ONCE = 128
"""The number of rows of activations that stay in a core's L2 cache while weights stream through."""

COLUMNS_AT_ONCE = 8 * TILE_COLUMNS
"""The largest number of columns in one piece of work."""

DEPTH_AT_ONCE = 1024
"""The largest number of a row's elements that are summed before the sum is stored: the data that a
tile reads from all its rows then stays in the L1 cache. This decides the order of additions."""

CHUNKS_PER_THREAD = 4
"""The smallest number of pieces for each thread, if there are enough columns: other threads then
take the pieces that a preempted thread has not begun."""

PREFETCHED_ROWS = 2
PREFETCHING_TILES = TILE_COLUMNS // PREFETCHED_ROWS
"""The first tiles prefetch the weights of the next columns, PREFETCHED_ROWS rows each."""

IN_ORDER, LISTED = "in order", "listed"


class Rows(NamedTuple):
    """The rows of activations that a product reads, float32.

    order: IN_ORDER: row i lies at `address + i * stride`; LISTED: row `indices[i]` does.
    indices: the address of int64; unused if the rows are in order.
    """

    address: Any
    stride: Any
    indices: Any
    order: str


class Weights(NamedTuple):
    """A matrix of weights.

    address: [columns, k] of dtype `kind`, contiguous.
    scale, bias: the addresses of [columns] float32 and [columns] of dtype `bias_kind`, or 0.
    """

    address: Any
    k: Any
    scale: Any
    bias: Any
    kind: str
    bias_kind: str


def _tile(num_rows: int, num_columns: int):
    """Returns an emitter of one tile of the product.

    The emitter is tile(x, x_stride, indices, row, weight, w_stride, k, out, out_stride, adds,
    ahead, kind, order): strides are in bytes, k in elements; x, x_stride, indices, order: see
    `Rows`; `row`: the first row; `adds`: whether to add to the values in `out`; `ahead`: the
    address of weights to prefetch; `kind`: the dtype name of the weights.
    """

    @emitted
    def tile(
        builder, x, x_stride, indices, row, weight, w_stride, k, out, out_stride, adds, ahead,
        kind, order,
    ):  # fmt: skip
        num_bytes = STORED[kind][1]
        e = Emitter(builder)
        row_addresses = lambda base, stride, n: [  # noqa: E731
            e.at(base, builder.mul(stride, e.const(i))) for i in range(n)
        ]
        places = [builder.add(row, e.const(i)) for i in range(num_rows)]
        if order == LISTED:
            places = [e.load_word(e.at(indices, builder.mul(i, e.const(8)))) for i in places]
        xs = [e.at(x, builder.mul(x_stride, i)) for i in places]
        ws = row_addresses(weight, w_stride, num_columns)
        soon = row_addresses(ahead, w_stride, PREFETCHED_ROWS)
        whole = builder.and_(k, e.const(-LANES))

        def step(sums, offset, load):
            x_at = builder.mul(offset, e.const(4))
            w_at = builder.mul(offset, e.const(num_bytes))
            columns = [load(e.at(w, w_at), kind) for w in ws]
            out = []
            for i, row in enumerate(xs):
                value = load(e.at(row, x_at), "float32")
                out += [
                    e.fma(value, column, sums[i * num_columns + j])
                    for j, column in enumerate(columns)
                ]
            return out

        sums = [e.zeros()] * (num_rows * num_columns)
        before = builder.block
        loop_block = builder.append_basic_block("whole")
        tail_test = builder.append_basic_block("tail_test")
        has_whole = builder.icmp_signed(">", whole, e.const(0))
        builder.cbranch(has_whole, loop_block, tail_test)
        builder.position_at_end(loop_block)
        loop = Loop(e, e.const(0), whole, LANES)
        loop.begin(sums)
        for row in soon:
            e.prefetch(e.at(row, builder.mul(loop.index, e.const(num_bytes))))
        inner = step(loop.values, loop.index, e.load)
        loop.end(inner)
        after_loop = builder.block
        builder.branch(tail_test)
        builder.position_at_end(tail_test)
        merged = [builder.phi(e.vector) for _ in sums]
        for phi, zero, value in zip(merged, sums, inner, strict=True):
            phi.add_incoming(zero, before)
            phi.add_incoming(value, after_loop)
        rest = builder.sub(k, whole)
        tail = builder.append_basic_block("tail")
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", rest, e.const(0)), tail, done)
        builder.position_at_end(tail)
        with_tail = step(merged, whole, lambda at, kind: e.load_first(at, rest, kind))
        builder.branch(done)
        builder.position_at_end(done)
        final = [builder.phi(e.vector) for _ in sums]
        for phi, value, other in zip(final, merged, with_tail, strict=True):
            phi.add_incoming(value, tail_test)
            phi.add_incoming(other, tail)
        columns, adds = e.const(num_columns), builder.icmp_signed("!=", adds, e.const(0))
        for i, totals in enumerate(e.sums(final, num_columns)):
            row = e.at(out, builder.mul(out_stride, e.const(i)))
            before = e.load_first(row, columns)
            kept = builder.select(adds, before, e.zeros())
            e.store_first(builder.fadd(kept, totals), row, num_columns)

    return tile


tile = _tile(TILE_ROWS, TILE_COLUMNS)
row_tile = _tile(1, TILE_COLUMNS)


@compiled_noinline
def _multiply_tiles(
    x, x_stride, indices, w, w_stride, k, out, out_stride, num_rows, adds, kind, order
):
    """Multiplies all rows with the columns of one tile, over a part of k."""
    ahead = w + TILE_COLUMNS * w_stride
    row = 0
    while row + TILE_ROWS <= num_rows:
        out_at = out + row * out_stride
        tile(
            x, x_stride, indices, row, w, w_stride, k, out_at, out_stride, adds, ahead, kind, order
        )
        row += TILE_ROWS
        ahead = ahead + PREFETCHED_ROWS * w_stride if row < PREFETCHING_TILES * TILE_ROWS else w
    while row < num_rows:
        out_at = out + row * out_stride
        row_tile(
            x, x_stride, indices, row, w, w_stride, k, out_at, out_stride, adds, ahead, kind, order
        )
        row += 1


@compiled
def _finish(out, out_stride, num_rows, columns, num_columns, weights):
    """Computes ``out * scale + bias`` over a chunk of columns."""
    for row in range(num_rows):
        values = floats(out + row * out_stride + columns * 4)
        if weights.scale != 0:
            factors = floats(weights.scale + columns * 4)
            for column in range(num_columns):
                values[column] *= factors[column]
        if weights.bias != 0:
            for column in range(num_columns):
                values[column] += number(weights.bias, columns + column, weights.bias_kind)


@compiled
def product(rows, num_rows, weights, columns, num_columns, out, out_stride):
    """Multiplies some rows with one chunk of columns, at least TILE_COLUMNS.

    Args:
        rows: the `Rows`; the first `num_rows` are used.
        weights: the `Weights`.
        columns: the first column of the chunk.
        out, out_stride: row i's products lie at ``out + i * out_stride + 4 * column``.
    """
    k, kind = weights.k, weights.kind
    w_stride = k * itemsize(kind)
    parts = (k + DEPTH_AT_ONCE - 1) // DEPTH_AT_ONCE
    depth = ((k + parts - 1) // parts + LANES - 1) // LANES * LANES
    end = columns + num_columns
    column = columns
    while column < end:
        column = min(column, end - TILE_COLUMNS)  # the last tile overlaps the one before
        for begin in range(0, k, depth):
            w = weights.address + column * w_stride + begin * itemsize(kind)
            _multiply_tiles(
                rows.address + 4 * begin, rows.stride, rows.indices, w, w_stride,
                min(depth, k - begin), out + 4 * column, out_stride, num_rows, begin, kind,
                rows.order,
            )  # fmt: skip
        column += TILE_COLUMNS
    if weights.scale != 0 or weights.bias != 0:
        _finish(out, out_stride, num_rows, columns, num_columns, weights)


@compiled
def chunk_width(num_columns, num_threads):
    """Returns the number of columns in a piece of work; the last piece has the rest, too."""
    width = min(COLUMNS_AT_ONCE, num_columns // (CHUNKS_PER_THREAD * num_threads))
    return max(width // TILE_COLUMNS, 1) * TILE_COLUMNS


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_rows, num_columns = word(word(operands, 0), 0), word(operands, 6)
    num_chunks = num_columns // chunk_width(num_columns, num_threads)
    return (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * num_chunks


@compiled
def _multiply(operands, piece, thread, num_threads, kind, bias_kind):
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
        Rows(x + first_row * x_stride, x_stride, 0, IN_ORDER), rows,
        Weights(weight, k, scale, bias, kind, bias_kind), columns, chunk_columns,
        out + first_row * out_stride, out_stride,
    )  # fmt: skip


MULTIPLY = {
    "float32": Kernel(_pieces, _multiply, "float32", "float32"),
    "float16": Kernel(_pieces, _multiply, "float16", "float16"),
    "bfloat16": Kernel(_pieces, _multiply, "bfloat16", "bfloat16"),
}
"""Kernels by the dtype name of weights and bias. ``out = x @ weight.T * scale + bias``; x, scale
and out are float32.

Operands: address of the number of rows; x, its stride; out, its stride; weight [columns, k]
contiguous, columns (at least TILE_COLUMNS), k; scale [columns] or 0; bias [columns] or 0.
Tensors are given by their addresses, strides in bytes.

2 * columns * k flops for each row; all weights are read once for every ROWS_AT_ONCE rows.
"""

MULTIPLY_INT8 = {
    "float32": Kernel(_pieces, _multiply, "int8", "float32"),
    "float16": Kernel(_pieces, _multiply, "int8", "float16"),
    "bfloat16": Kernel(_pieces, _multiply, "int8", "bfloat16"),
}
"""Kernels by the dtype name of the bias: as MULTIPLY, but the weights are int8."""
