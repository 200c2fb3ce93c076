"""The code of one tile of a matrix product: a few rows of activations times a few columns.

The tile's shape follows Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008): the accumulators fill the vector registers. Tiles of every shape add in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from shmllm_kernels.cpu.arithmetic import ARITHMETIC, Arithmetic
from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.simd import LANES, STORED, Emitter, Loop
from shmllm_kernels.cpu.unpacking import PACKINGS, whole_run

TILE_ROWS, TILE_COLUMNS = {16: (4, 6), 8: (2, 4), 4: (6, 4)}[LANES]
PREFETCHED_ROWS = 2
"""The number of rows of weights that a tile prefetches, if there are more tiles of the same columns
to prefetch the others. Too many at once delay a tile's own loads."""

IN_ORDER, LISTED = "in order", "listed"
"""Where a row of activations lies; see `products.Rows`."""


def places_of_rows(
    e: Emitter, indices: ir.Value, row: ir.Value, num_rows: int, order: str
) -> list[ir.Value]:
    """Returns where some rows of activations lie, from the one with the index `row` on."""
    rows = [e.builder.add(row, e.const(i)) for i in range(num_rows)]
    if order == IN_ORDER:
        return rows
    return [e.load_word(e.at(indices, e.builder.mul(each, e.const(8)))) for each in rows]


def _tile(num_rows: int, num_columns: int, num_prefetched: int):
    """Returns an emitter of one tile of the product.

    The emitter is tile(x, x_stride, indices, row, weight, w_stride, k, out, out_stride, adds,
    ahead, correction, kind, x_kind, order): strides are in bytes, k in elements; x, x_stride,
    indices, x_kind, order: see `products.Rows`; `row`: the first row; `adds`: whether to add to the
    values in `out`; `ahead`: the address of weights to prefetch; `correction`: how far behind its
    activations a row has the number that `Arithmetic.begin` takes; `kind`: the dtype name of the
    weights.
    """

    @emitted
    def tile(
        builder, x, x_stride, indices, row, weight, w_stride, k, out, out_stride, adds, ahead,
        correction, kind, x_kind, order,
    ):  # fmt: skip
        num_bytes, way = STORED[kind][1], ARITHMETIC[x_kind]
        e = Emitter(builder)
        row_addresses = lambda base, stride, n: [  # noqa: E731
            e.at(base, builder.mul(stride, e.const(i))) for i in range(n)
        ]
        places = places_of_rows(e, indices, row, num_rows, order)
        xs = [e.at(x, builder.mul(x_stride, i)) for i in places]
        ws = row_addresses(weight, w_stride, num_columns)
        soon = row_addresses(ahead, w_stride, num_prefetched)
        whole = builder.and_(k, e.const(-way.width))
        adding = builder.icmp_signed("!=", adds, e.const(0))

        def step(sums, offset, load_x, load_weight):
            x_at = builder.mul(offset, e.const(way.num_bytes))
            w_at = builder.mul(offset, e.const(num_bytes))
            columns = [load_weight(e.at(w, w_at)) for w in ws]
            out = []
            for i, row in enumerate(xs):
                value = load_x(e.at(row, x_at))
                out += [
                    way.multiply_add(e, value, column, sums[i * num_columns + j])
                    for j, column in enumerate(columns)
                ]
            return out

        sums = []
        for at in xs:
            sums += [way.begin(e, e.at(at, correction))] * num_columns
        before = builder.block
        loop_block = builder.append_basic_block("whole")
        tail_test = builder.append_basic_block("tail_test")
        has_whole = builder.icmp_signed(">", whole, e.const(0))
        builder.cbranch(has_whole, loop_block, tail_test)
        builder.position_at_end(loop_block)
        loop = Loop(e, e.const(0), whole, way.width)
        loop.begin(sums)
        for row in soon:
            e.prefetch(e.at(row, builder.mul(loop.index, e.const(num_bytes))))
        inner = step(
            loop.values,
            loop.index,
            lambda at: way.load_x(e, at),
            lambda at: way.load_weight(e, at, kind),
        )
        loop.end(inner)
        after_loop = builder.block
        builder.branch(tail_test)
        builder.position_at_end(tail_test)
        merged = _joined(builder, sums, before, inner, after_loop)
        rest = builder.sub(k, whole)
        tail = builder.append_basic_block("tail")
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", rest, e.const(0)), tail, done)
        builder.position_at_end(tail)
        with_tail = step(
            merged,
            whole,
            lambda at: way.load_first_x(e, at, rest),
            lambda at: way.load_first_weight(e, at, rest, kind),
        )
        after_tail = builder.block
        builder.branch(done)
        builder.position_at_end(done)
        final = _joined(builder, merged, tail_test, with_tail, after_tail)
        _store(e, way, final, num_columns, out, out_stride, adding)

    return tile


def _store(
    e: Emitter, way: Arithmetic, sums: Sequence[ir.Value], num_columns: int, out: ir.Value,
    out_stride: ir.Value, adds: ir.Value,
) -> None:  # fmt: skip
    """Sums over the lanes, and writes the result of a tile."""
    for i, totals in enumerate(e.sums(sums, num_columns)):
        row = e.at(out, e.builder.mul(out_stride, e.const(i)))
        before = e.load_first(row, e.const(num_columns))
        kept = e.builder.select(adds, before, e.zeros())
        e.store_first(e.builder.fadd(kept, way.end(e, totals)), row, num_columns)


def unpacking_tile(num_rows: int, num_columns: int):
    """Returns an emitter of one tile that unpacks its weights in registers, for so few rows that
    these wait for the weights. The bits are those of a panel of unpacked weights and `tile`.

    The emitter is tile(x, x_stride, weight, w_stride, scales, scale_stride, k, out, out_stride,
    adds, kind, x_kind): `scales`: float32, `scale_stride` bytes from one column to the next; the
    rows are in order; the others: see `tile`. It prefetches the next columns.
    """

    @emitted
    def tile(
        builder, x, x_stride, weight, w_stride, scales, scale_stride, k, out, out_stride, adds,
        kind, x_kind,
    ):  # fmt: skip
        packing, way = PACKINGS[kind], ARITHMETIC[x_kind]
        num_bytes = packing.codes.run_bytes
        e = Emitter(builder)
        address = lambda base, stride, i: e.at(base, builder.mul(stride, e.const(i)))  # noqa: E731
        xs = [address(x, x_stride, i) for i in range(num_rows)]
        ws = [address(weight, w_stride, i) for i in range(num_columns)]
        own = [address(scales, scale_stride, i) for i in range(num_columns)]
        ahead = builder.mul(w_stride, e.const(num_columns))
        adding = builder.icmp_signed("!=", adds, e.const(0))

        def step(sums, run, load_x, begin):
            sums = list(sums)
            x_at = builder.mul(run, e.const(RUN * way.num_bytes))
            w_at = builder.mul(run, e.const(num_bytes))
            s_at = builder.mul(run, e.const(4 * packing.num_scales))
            for j in range(num_columns):
                source = begin(e.at(ws[j], w_at))
                values = packing.unpack(e, source, e.at(own[j], s_at), x_kind)
                for part, value in enumerate(values):
                    for i, row in enumerate(xs):
                        read = load_x(e.at(row, x_at), part)
                        at = i * num_columns + j
                        sums[at] = way.multiply_add(e, read, value, sums[at])
            return sums

        def part_of(address, part):
            return e.at(address, part * way.width * way.num_bytes)

        zero = [way.begin(e, e.const(0))] * (num_rows * num_columns)
        whole = builder.sdiv(k, e.const(RUN))
        rest = builder.srem(k, e.const(RUN))
        before = builder.block
        runs, tail_test = (builder.append_basic_block(name) for name in ("runs", "tail_test"))
        builder.cbranch(builder.icmp_signed(">", whole, e.const(0)), runs, tail_test)
        builder.position_at_end(runs)
        loop = Loop(e, e.const(0), whole, 1)
        loop.begin(zero)
        for w in ws:
            e.prefetch(e.at(e.at(w, builder.mul(loop.index, e.const(num_bytes))), ahead))
        inner = step(
            loop.values,
            loop.index,
            lambda at, part: way.load_x(e, part_of(at, part)),
            lambda w: w,
        )
        loop.end(inner)
        after = builder.block
        builder.branch(tail_test)
        builder.position_at_end(tail_test)
        merged = _joined(builder, zero, before, inner, after)
        tail, done = (builder.append_basic_block(name) for name in ("tail", "done"))
        builder.cbranch(builder.icmp_signed(">", rest, e.const(0)), tail, done)
        builder.position_at_end(tail)
        with_tail = step(
            merged,
            whole,
            lambda at, part: way.load_first_x(
                e, part_of(at, part), builder.sub(rest, e.const(part * way.width))
            ),
            lambda w: whole_run.emit(builder, w, rest, kind),
        )
        after_tail = builder.block
        builder.branch(done)
        builder.position_at_end(done)
        final = _joined(builder, merged, tail_test, with_tail, after_tail)
        _store(e, way, final, num_columns, out, out_stride, adding)

    return tile


def _joined(
    builder: ir.IRBuilder, some: Sequence[ir.Value], block: ir.Block, others: Sequence[ir.Value],
    other_block: ir.Block,
) -> list[ir.Value]:  # fmt: skip
    """Returns the values of that one of two blocks from which the current one was reached."""
    joined = [builder.phi(value.type) for value in some]
    for phi, value, other in zip(joined, some, others, strict=True):
        phi.add_incoming(value, block)
        phi.add_incoming(other, other_block)
    return joined


tile = _tile(TILE_ROWS, TILE_COLUMNS, PREFETCHED_ROWS)
row_tile = _tile(1, TILE_COLUMNS, PREFETCHED_ROWS)
eager_tile = _tile(TILE_ROWS, TILE_COLUMNS, TILE_COLUMNS)
eager_row_tile = _tile(1, TILE_COLUMNS, TILE_COLUMNS)
"""As `tile` and `row_tile`, for few rows: they prefetch the weights of all the next columns."""
column_tile = _tile(1, 1, 1)
unpacking_row_tile = unpacking_tile(1, TILE_COLUMNS)
