"""Low-rank adapters: what their two small matrices add to a matrix product.

``out[m, n] += scale * sum over j of B[n, j] * (sum over k of A[j, k] * x[m, k])`` (Hu et al.,
"LoRA: Low-Rank Adaptation of Large Language Models", 2021), for rows of different adapters in one
step. SHRINK computes the inner sums with the tiles of `products`, EXPAND the outer ones: it keeps B
as [rank, columns], so that a vector has consecutive columns and no sum crosses its lanes. Every
element is summed in the same order, for any number of rows: results do not depend on the batch, to
the last bit. A row without an adapter is neither read nor written.

A step sorts its rows by adapter and divides them into units of one adapter. An adapter's matrices
for one product are described by an entry, int64 words that `entry_words` makes; entries are found
by address, so that nothing is copied when an adapter comes into use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import float_of_word, itemsize, word, word_of_float
from shmllm_kernels.cpu.product_tiles import LISTED, TILE_COLUMNS
from shmllm_kernels.cpu.products import Rows, Weights, product
from shmllm_kernels.cpu.simd import LANES, STORED, Emitter, Loop

DTYPES = ("float32", "bfloat16", "float16")
UNIT_ROWS = 64
"""The largest number of rows in a unit."""
UNIT_WORDS = 3
"""The words of a unit: the adapter's place, the first of its sorted rows, the number of them."""
TILE_VECTORS, TILE_ROWS = 4, 4
"""A tile of EXPAND has so many vectors of columns, and so many rows or one."""
PIECES_PER_THREAD = 2
"""The smallest number of pieces for each thread, if there are enough columns."""
_SEGMENT_WORDS = 6


class Segment(NamedTuple):
    """A projection's columns of a product.

    b: the address of [rank, num_columns], contiguous.
    first_rank, rank: its rows of A.
    column, num_columns: its columns in the output.
    scale: the factor of what is added.
    """

    b: int
    first_rank: int
    rank: int
    column: int
    num_columns: int
    scale: float


def entry_words(a: int, num_ranks: int, segments: Sequence[Segment]) -> list[int]:
    """Returns the words of an entry.

    Args:
        a: the address of [num_ranks, k], contiguous: the A of all projections of the product.
        num_ranks: the number of its rows.
        segments: the columns that are added to.
    """
    words = [a, num_ranks, len(segments)]
    for segment in segments:
        words += [*segment[:5], word_of_float(segment.scale)]
    return words


def _expanding_tile(num_rows: int, num_vectors: int):
    """Returns an emitter of one tile of EXPAND.

    The emitter is tile(t, t_stride, rank, b, b_stride, out, out_stride, indices, scale, count,
    kind): t: the address of the first row's products with A; b: the address of the first column in
    the first row of B; out: the address of the first column in output row 0; indices: the address
    of the rows' indices, int64; scale: float32; count: the number of columns, if the tile has one
    vector; strides are in bytes.
    """

    @emitted
    def tile(
        builder, t, t_stride, rank, b, b_stride, out, out_stride, indices, scale, count, kind
    ):  # fmt: skip
        e, num_bytes = Emitter(builder), STORED[kind][1]
        is_whole = num_vectors > 1
        ts = [e.at(t, builder.mul(t_stride, e.const(i))) for i in range(num_rows)]
        loop = Loop(e, e.const(0), rank, 1)
        loop.begin([e.zeros()] * (num_rows * num_vectors))
        row_of_b = e.at(b, builder.mul(loop.index, b_stride))
        columns = [
            e.load(e.at(row_of_b, i * LANES * num_bytes), kind)
            if is_whole
            else e.load_first(row_of_b, count, kind)
            for i in range(num_vectors)
        ]
        sums = []
        for i, row in enumerate(ts):
            factor = e.load_scalar(e.at(row, builder.mul(loop.index, e.const(4))))
            value = e.broadcast(factor)
            sums += [
                e.fma(value, column, loop.values[i * num_vectors + j])
                for j, column in enumerate(columns)
            ]
        loop.end(sums)
        factor = e.broadcast(scale)
        for i in range(num_rows):
            index = e.load_word(e.at(indices, 8 * i))
            for j in range(num_vectors):
                place = e.at(
                    out, builder.add(builder.mul(out_stride, index), e.const(4 * LANES * j))
                )
                before = e.load(place) if is_whole else e.load_first(place, count)
                after = e.fma(factor, sums[i * num_vectors + j], before)
                e.store(after, place) if is_whole else e.store_first(after, place, count)

    return tile


_tile = _expanding_tile(TILE_ROWS, TILE_VECTORS)
_row_tile = _expanding_tile(1, TILE_VECTORS)
_last_tile = _expanding_tile(1, 1)


@compiled
def _num_units(operands):
    return word(word(operands, 0), 0)


@compiled
def num_parts(num_units, most, num_threads):
    """Returns the number of parts that the columns of each unit are divided into."""
    units = max(num_units, 1)
    wanted = (PIECES_PER_THREAD * num_threads + units - 1) // units
    return max(min(wanted, most), 1)


@compiled
def _entry(operands, unit):
    """Returns the address of the entry of a unit's adapter, or 0."""
    place = word(word(operands, 1), UNIT_WORDS * unit)
    return word(word(operands, 2), place * word(operands, 4) + word(operands, 3))


@compiled
def part_width(num_columns, parts, multiple):
    return ((num_columns + parts - 1) // parts + multiple - 1) // multiple * multiple


@compiled
def shrink_rows(rows, num_rows, entry, k, t, t_stride, part, parts, kind):
    """Computes ``t = x @ A.T`` for one of the parts of an A's rows.

    Args:
        rows: the `products.Rows` of x, [rows, k].
        entry: the address of the entry.
        t, t_stride: row i's products lie at ``t + i * t_stride``.
    """
    num_ranks = word(entry, 1)
    width = part_width(num_ranks, parts, TILE_COLUMNS)
    begin = part * width
    if begin < num_ranks:
        weights = Weights(word(entry, 0), k, 0, 0, kind, kind)
        product(rows, num_rows, weights, begin, min(width, num_ranks - begin), t, t_stride)


@compiled
def _shrink_pieces(operands, piece, thread, num_threads):
    most = word(operands, 11) // TILE_COLUMNS
    return _num_units(operands) * num_parts(_num_units(operands), most, num_threads)


@compiled
def _shrink(operands, piece, thread, num_threads, kind):
    parts = num_parts(_num_units(operands), word(operands, 11) // TILE_COLUMNS, num_threads)
    unit = piece // parts
    entry = _entry(operands, unit)
    if entry != 0:
        units = word(operands, 1)
        first, count = word(units, UNIT_WORDS * unit + 1), word(units, UNIT_WORDS * unit + 2)
        rows = Rows(
            word(operands, 6), word(operands, 7), word(operands, 5) + 8 * first, "float32", LISTED
        )
        t, t_stride = word(operands, 9), word(operands, 10)
        shrink_rows(
            rows, count, entry, word(operands, 8), t + first * t_stride, t_stride,
            piece % parts, parts, kind,
        )  # fmt: skip


@compiled
def _expand_columns(
    t, t_stride, segment, begin, count, out, out_stride, indices, num_rows, kind
):  # fmt: skip
    """Adds to some columns of a segment, from `begin` on, of a unit's rows."""
    rank, num_columns = word(segment, 2), word(segment, 4)
    scale = float_of_word(word(segment, 5))
    b_stride = num_columns * itemsize(kind)
    t = t + 4 * word(segment, 1)
    column = 0
    while column < count:
        b = word(segment, 0) + (begin + column) * itemsize(kind)
        at = out + 4 * (word(segment, 3) + begin + column)
        row = 0
        if column + TILE_VECTORS * LANES <= count:
            while row + TILE_ROWS <= num_rows:
                _tile(
                    t + row * t_stride, t_stride, rank, b, b_stride, at, out_stride,
                    indices + 8 * row, scale, 0, kind,
                )  # fmt: skip
                row += TILE_ROWS
            while row < num_rows:
                _row_tile(
                    t + row * t_stride, t_stride, rank, b, b_stride, at, out_stride,
                    indices + 8 * row, scale, 0, kind,
                )  # fmt: skip
                row += 1
            column += TILE_VECTORS * LANES
        else:
            some = min(LANES, count - column)
            while row < num_rows:
                _last_tile(
                    t + row * t_stride, t_stride, rank, b, b_stride, at, out_stride,
                    indices + 8 * row, scale, some, kind,
                )  # fmt: skip
                row += 1
            column += some


@compiled
def expand_rows(
    t, t_stride, entry, begin, end, out, out_stride, indices, num_rows, kind
):  # fmt: skip
    """Computes ``out += scale * t @ B`` for the columns [begin, end) of some rows.

    Args:
        t: the address of the first row's products with A.
        entry: the address of the entry.
        out: column c of row i lies at ``out + indices[i] * out_stride + 4 * c``.
        indices: the address of int64.
    """
    for index in range(word(entry, 2)):
        segment = entry + 8 * (3 + index * _SEGMENT_WORDS)
        column = word(segment, 3)
        low = max(begin, column)
        high = min(end, column + word(segment, 4))
        if low < high:
            _expand_columns(
                t, t_stride, segment, low - column, high - low, out, out_stride, indices, num_rows,
                kind,
            )  # fmt: skip


@compiled
def _expand_pieces(operands, piece, thread, num_threads):
    most = word(operands, 10) // (TILE_VECTORS * LANES)
    return _num_units(operands) * num_parts(_num_units(operands), most, num_threads)


@compiled
def _expand(operands, piece, thread, num_threads, kind):
    width_in_all = word(operands, 10)
    most = width_in_all // (TILE_VECTORS * LANES)
    parts = num_parts(_num_units(operands), most, num_threads)
    unit = piece // parts
    entry = _entry(operands, unit)
    if entry != 0:
        units = word(operands, 1)
        first, count = word(units, UNIT_WORDS * unit + 1), word(units, UNIT_WORDS * unit + 2)
        width = part_width(width_in_all, parts, TILE_VECTORS * LANES)
        begin = piece % parts * width
        end = min(begin + width, width_in_all)
        t, t_stride = word(operands, 6), word(operands, 7)
        expand_rows(
            t + first * t_stride, t_stride, entry, begin, end, word(operands, 8),
            word(operands, 9), word(operands, 5) + 8 * first, count, kind,
        )  # fmt: skip


SHRINK = {kind: Kernel(_shrink_pieces, _shrink, kind) for kind in DTYPES}
"""Kernels by the dtype name of A: ``t = x @ A.T`` for the rows of every unit.

Operands: address of the number of units; units [units, UNIT_WORDS] int64; table [places, products]
int64, the addresses of entries, 0: an adapter changes nothing in a product; index of the product;
products; indices int64, the rows of x in the order of the units; x float32, its stride; k; t
float32, its stride; the largest number of rows that an A has.
t has the rows in the order of the units. Strides are in bytes.
"""

EXPAND = {kind: Kernel(_expand_pieces, _expand, kind) for kind in DTYPES}
"""Kernels by the dtype name of B: ``out += scale * t @ B`` for the rows of every unit.

Operands: the first six of SHRINK; t, its stride; out float32, its stride; columns of out.
"""
