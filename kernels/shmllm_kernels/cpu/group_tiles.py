"""The code of `group_products`: the tiles that multiply a panel of `group_panels`.

A lane adds up its own column, and no sum goes over lanes. A single row would wait for the panel:
its tile reads the columns as they are stored, and only parameters come from the panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir

from shmllm_kernels.cpu.arithmetic import HAS_DOTS_OF_BYTES
from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.group_arithmetic import OWN, in_order
from shmllm_kernels.cpu.group_panels import (
    PANEL_COLUMNS,
    PARAMETERS_AT,
    PLANE_VECTORS,
    RUN_BYTES,
    VECTOR_BYTES,
    bytes_of,
    column_of,
    prefetch_columns,
    prefetch_in_order,
    run_bytes,
)
from shmllm_kernels.cpu.group_rounding import GROUPINGS, num_planes
from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.product_tiles import places_of_rows
from shmllm_kernels.cpu.shuffles import part_sums
from shmllm_kernels.cpu.simd import INT32, NUM_REGISTERS, Emitter, Loop
from shmllm_kernels.cpu.unpacking import PACKINGS

HAS_EIGHT_ROWS = NUM_REGISTERS == 32
"""Whether the sums of a tile of eight rows fit into the registers."""
_PART = RUN // 4
"""The elements of the smallest group."""
_CHAINS = 4
"""The smallest number of sums that a tile adds to in turn: an addition takes as many cycles."""


def _broadcast_int(e: Emitter, address: ir.Value) -> ir.Value:
    number = e.builder.load(e.builder.inttoptr(address, INT32.as_pointer()), align=4)
    undef = ir.Constant(e.integers, ir.Undefined)
    one = e.builder.insert_element(undef, number, ir.Constant(INT32, 0))
    return e.builder.shuffle_vector(one, undef, e.splat_int(0))


AddRuns = Callable[[ir.Value, ir.Value, list[ir.Value]], list[ir.Value]]
"""(the first run's index in the panel, its place in a row, sums of rows) -> sums with its runs."""


class _Run:
    """Emits the products of one run of weights.

    Args:
        place: the index of the run in the panel.
        elements: the place of the run in a row of activations.
        scales_at, numbers_bytes: where in a row its scales lie, and their size.
    """

    def __init__(
        self, e: Emitter, kind: str, x_kind: str, panel: ir.Value, place: ir.Value,
        elements: ir.Value, scales_at: ir.Value, numbers_bytes: ir.Value,
    ) -> None:  # fmt: skip
        b = e.builder
        self.e, self.packing = e, PACKINGS[kind]
        self.num_planes, self.group = num_planes(x_kind), GROUPINGS[x_kind].size
        self.codes = e.at(panel, b.mul(place, e.const(RUN_BYTES)))
        size = e.const(self.packing.num_scales * VECTOR_BYTES)
        self.own = e.at(e.at(panel, PARAMETERS_AT), b.mul(place, size))
        self.planes_at = b.mul(elements, e.const(self.num_planes))
        self.numbers_bytes = numbers_bytes
        self.scales = b.add(scales_at, b.sdiv(elements, e.const(self.group // 4)))

    def parameters(self, first: int) -> tuple[ir.Value, ir.Value | None]:
        """Returns the columns' scales and offsets in the group of the element `first`."""
        e, packing = self.e, self.packing
        places = range(first // packing.group, packing.num_scales, RUN // packing.group)
        own = [e.load(e.at(self.own, VECTOR_BYTES * place)) for place in places]
        offset = packing.form.offset and packing.form.offset(e.builder, *own)
        unit = packing.codes.byte_unit
        scale = own[0] if unit == 1 else e.builder.fmul(own[0], ir.Constant(e.vector, [unit] * 16))
        return scale, offset

    def begin(self, first: int, x: ir.Value) -> ir.Value:
        """Returns minus the bias of the bytes times the sum of a row's group, int32."""
        e, b, bias = self.e, self.e.builder, self.packing.codes.byte_bias
        if bias == 0:
            return e.splat_int(0)
        at = b.add(self._scale_at(first, x), b.mul(self.numbers_bytes, e.const(2)))
        return b.shl(_broadcast_int(e, at), e.splat_int(bias.bit_length() - 1))

    def _scale_at(self, first: int, x: ir.Value) -> ir.Value:
        return self.e.at(self.e.at(x, self.scales), 4 * (first // self.group))

    def add(
        self, first: int, x: ir.Value, products: ir.Value, sums: ir.Value,
        parameters: tuple[ir.Value, ir.Value | None],
    ) -> ir.Value:  # fmt: skip
        """Adds a group's products, int32, to the sums of a row."""
        e, b = self.e, self.e.builder
        at, (scale, offset) = self._scale_at(first, x), parameters
        factor = b.fmul(scale, e.broadcast(e.load_scalar(at)))
        sums = e.fma(b.sitofp(products, e.vector), factor, sums)
        if offset is None:
            return sums
        total = e.broadcast(e.load_scalar(b.add(at, self.numbers_bytes)))
        return e.fma(offset, total, sums)

    def word(self, place: int) -> ir.Value:
        """Loads a vector of the panel's words."""
        at = self.e.at(self.codes, VECTOR_BYTES * place)
        pointer = self.e.builder.inttoptr(at, self.e.integers.as_pointer())
        return self.e.builder.load(pointer, align=VECTOR_BYTES)

    def dots(
        self, first: int, xs: Sequence[ir.Value], word: Callable[[int], ir.Value]
    ) -> list[ir.Value]:
        """Returns for each row the products of a group. word: index of a vector -> its words."""
        e, b = self.e, self.e.builder
        count = max(1, _CHAINS // len(xs))
        chains = [[e.splat_int(0)] * count for _ in xs]
        for plane in range(self.num_planes):
            if plane:
                chains = [[self.shifted(total) for total in sums] for sums in chains]
            of_weights = plane % OWN.num_weight_planes * PLANE_VECTORS
            for i in range(self.group // 4):
                weights = word(of_weights + first // 4 + i)
                for x, sums in zip(xs, chains, strict=True):
                    own = _broadcast_int(e, e.at(self.plane(x, plane), first + 4 * i))
                    sums[i % count] = OWN.dot(e, sums[i % count], weights, own)
                chains = [in_order(e, sums) for sums in chains]
        for x, sums in zip(xs, chains, strict=True):
            sums[0] = b.add(sums[0], self.begin(first, x))
            while len(sums) > 1:
                sums[:] = [b.add(*sums[i : i + 2]) for i in range(0, len(sums), 2)]
        return [sums[0] for sums in chains]

    def shifted(self, products: ir.Value) -> ir.Value:
        """Returns products with a plane in units of those with the next one."""
        if OWN.place_bits == 0:
            return products
        return self.e.builder.shl(products, self.e.splat_int(OWN.place_bits))

    def plane(self, x: ir.Value, place: int) -> ir.Value:
        """Returns the address of one plane of the run."""
        return self.e.at(self.e.at(x, self.planes_at), RUN * place)


def _tile(num_rows: int):
    """Returns an emitter of one tile: `num_rows` rows times the columns of a panel.

    The emitter is tile(x, x_stride, indices, row, scales_at, numbers_bytes, first_run, num_runs,
    panel, ahead, stride, out, out_stride, num_columns, kind, x_kind, order). x, x_stride, indices,
    order: see `products.Rows`; row: the first row; scales_at, numbers_bytes: where in a row its
    scales lie, and their size: see `group_rounding`; first_run: the run of the rows that the panel
    begins with; if it is not 0, the tile adds to what `out` has; ahead, stride: the codes of
    columns to prefetch, and the bytes from one to the next.
    """

    @emitted
    def tile(
        builder, x, x_stride, indices, row, scales_at, numbers_bytes, first_run, num_runs, panel,
        ahead, stride, out, out_stride, num_columns, kind, x_kind, order,
    ):  # fmt: skip
        e = Emitter(builder, PANEL_COLUMNS)
        places = places_of_rows(e, indices, row, num_rows, order)
        xs = [e.at(x, builder.mul(x_stride, place)) for place in places]
        outs = [e.at(out, builder.mul(out_stride, e.const(i))) for i in range(num_rows)]

        def add_run(place: ir.Value, elements: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            run = _Run(e, kind, x_kind, panel, place, elements, scales_at, numbers_bytes)
            num_bytes = run_bytes(kind)
            at = e.at(ahead, builder.mul(place, e.const(num_bytes)))
            prefetch_columns(e, at, stride, num_bytes)
            for first in range(0, RUN, run.group):
                own, dots = run.parameters(first), run.dots(first, xs, run.word)
                rows = zip(xs, dots, sums, strict=True)
                sums = [run.add(first, x, products, total, own) for x, products, total in rows]
            return sums

        _add_runs(e, outs, first_run, e.const(0), num_runs, num_columns, add_run)

    return tile


def has_words(kind: str) -> bool:
    """Whether the tile of a single row reads words, and so the two runs of a cache line at once."""
    return HAS_DOTS_OF_BYTES and PACKINGS[kind].codes.words is not None


def _row_tile(count: int):
    """Returns an emitter of the tile of a single row, which reads `count` runs together.

    The emitter is tile(x, scales_at, numbers_bytes, first_run, begin, end, source, stride, panel,
    out, num_columns, kind, x_kind). It takes columns as they are stored, and the parameters of a
    panel. begin, end: the runs of the panel to take; source, stride: see `place_codes`; the others:
    see `_tile`.
    """

    @emitted
    def tile(
        builder, x, scales_at, numbers_bytes, first_run, begin, end, source, stride, panel, out,
        num_columns, kind, x_kind,
    ):  # fmt: skip
        e = Emitter(builder, PANEL_COLUMNS)
        last = builder.sub(num_columns, ir.Constant(num_columns.type, 1))
        words = PACKINGS[kind].codes.words if has_words(kind) else None

        def add_runs(place: ir.Value, elements: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            codes = e.at(source, builder.mul(place, e.const(run_bytes(kind))))
            behind = e.at(codes, builder.mul(stride, e.const(PANEL_COLUMNS)))
            if HAS_DOTS_OF_BYTES:
                prefetch_columns(e, behind, stride, count * run_bytes(kind))
            else:
                prefetch_in_order(e, behind, stride, place, end, run_bytes(kind))
            columns = [column_of(e, codes, stride, last, i) for i in range(PANEL_COLUMNS)]
            read = words(e, columns, count) if words else []
            for i in range(count):
                run = _Run(
                    e, kind, x_kind, panel, builder.add(place, e.const(i)),
                    builder.add(elements, e.const(RUN * i)), scales_at, numbers_bytes,
                )  # fmt: skip
                if words:
                    dots = _dots_of_words(run, x, read[RUN // 4 * i :])
                else:
                    dots = _dots_of_columns(run, x, columns, kind)
                for first, products in dots:
                    sums = [run.add(first, x, products, sums[0], run.parameters(first))]
            return sums

        _add_runs(e, [out], first_run, begin, end, num_columns, add_runs, count)

    return tile


def _dots_of_words(
    run: _Run, x: ir.Value, words: Sequence[ir.Value]
) -> Iterator[tuple[int, ir.Value]]:
    """Yields the first element of each group, and the group's products in each column."""
    for first in range(0, RUN, run.group):
        yield first, run.dots(first, [x], words.__getitem__)[0]


def _dots_of_columns(
    run: _Run, x: ir.Value, columns: Sequence[ir.Value], kind: str
) -> Iterator[tuple[int, ir.Value]]:
    """As `_dots_of_words`, without a transposition: it sums over lanes instead."""
    e, b = run.e, run.e.builder
    planes = [
        b.load(b.inttoptr(run.plane(x, place), e.integers.as_pointer()), align=1)
        for place in range(run.num_planes)
    ]

    def products_of(column: ir.Value) -> ir.Value:
        read = OWN.weight_planes(e, bytes_of(e, column, kind))
        total = e.splat_int(0)
        for place, plane in enumerate(planes):
            before = run.shifted(total) if place else total
            total = OWN.dot(e, before, read[place % len(read)], plane)
        return total

    parts = part_sums(e, [products_of(each) for each in columns])
    for first in range(0, RUN, run.group):
        products = run.begin(first, x)
        for part in parts[first // _PART : (first + run.group) // _PART]:
            products = b.add(products, part)
        yield first, products


def _add_runs(
    e: Emitter, outs: Sequence[ir.Value], first_run: ir.Value, begin: ir.Value, end: ir.Value,
    num_columns: ir.Value, add: AddRuns, count: int = 1,
) -> None:  # fmt: skip
    """Loops over the runs of a panel from `begin` to `end`, by `count`, and adds their sums to each
    row of `outs`, or stores them there if they are the first ones of a row."""
    b = e.builder
    adds = b.icmp_signed(">", b.add(first_run, begin), e.const(0))
    before = [b.select(adds, e.load_first(out, num_columns), e.zeros()) for out in outs]
    loop = Loop(e, begin, end, count)
    loop.begin(before)
    elements = b.mul(b.add(first_run, loop.index), e.const(RUN))
    sums = add(loop.index, elements, list(loop.values))
    loop.end(sums)
    for out, total in zip(outs, sums, strict=True):
        e.store_first(total, out, num_columns)


one_row_tile, two_rows_tile, four_rows_tile, eight_rows_tile = map(_tile, (1, 2, 4, 8))
row_tile, row_pairs_tile = map(_row_tile, (1, 2))
