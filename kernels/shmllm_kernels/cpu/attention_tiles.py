"""Register tiles of attention's two products, for a few query rows and some vectors of keys.

Accumulators fill the vector registers. A score is summed over the dimensions in their order, an
output over the keys in their order, both by fused multiply-adds: results do not depend on the
number of rows and vectors of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llvmlite import ir

from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.simd import LANES, NUM_REGISTERS, STORED, Emitter, Loop

KEY_VECTORS = 8
"""The number of vectors in a chunk of keys, after which the softmax is updated. Chunks begin at
multiples of this number."""

SCORES_STRIDE = KEY_VECTORS * LANES * 4
"""Bytes from one row of scores to the next."""

_REGISTERS_FOR_TILES = NUM_REGISTERS * 7 // 8


def max_tile_vectors(num_rows: int) -> int:
    """Returns the largest number of vectors in a tile of `num_rows` rows.

    The tile's sums and one row of operands must fit into 7/8 of the registers. If fewer registers
    are left, LLVM keeps a sum in memory.
    """
    return max(width for width in (1, 2, 4, 8) if width * (num_rows + 1) <= _REGISTERS_FOR_TILES)


def _add_products(
    e: Emitter, rows: Sequence[ir.Value], columns: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> list[ir.Value]:
    """Returns ``sums[i, j] + rows[i] * columns[j]``. rows: addresses of floats."""
    out = []
    for i, row in enumerate(rows):
        factor = e.broadcast(e.load_scalar(row))
        for j, column in enumerate(columns):
            out.append(e.fma(factor, column, sums[i * len(columns) + j]))
    return out


@cache
def score_tile(num_rows: int, num_vectors: int):
    """Returns an emitter of the product of queries and keys.

    The emitter is tile(query, keys, stride, head_dim, out, behind, kind). It also prefetches.

    query: address of float32 [head_dim, num_rows].
    keys: address of a table of addresses, those of each vector's first dimension.
    stride: bytes from one dimension of a vector to the next.
    out: address of the scores, float32 [num_rows, SCORES_STRIDE].
    behind: bytes from the keys that are read to the data to prefetch.
    """

    @emitted
    def tile(builder, query, keys, stride, head_dim, out, behind, kind):
        e = Emitter(builder)
        vectors = [e.load_word(e.at(keys, 8 * j)) for j in range(num_vectors)]
        stop = builder.mul(head_dim, e.const(4 * num_rows))
        loop = Loop(e, e.const(0), stop, 4 * num_rows)
        zeros = [e.zeros()] * (num_rows * num_vectors)
        loop.begin([e.const(0), *zeros])
        offset, *sums = loop.values
        soon = builder.add(offset, behind)
        for vector in vectors:
            e.prefetch(e.at(vector, soon))
        columns = [e.load(e.at(vector, offset), kind) for vector in vectors]
        row = e.at(query, loop.index)
        sums = _add_products(e, [e.at(row, 4 * i) for i in range(num_rows)], columns, sums)
        loop.end([builder.add(offset, stride), *sums])
        for i in range(num_rows):
            for j in range(num_vectors):
                place = e.at(out, i * SCORES_STRIDE + j * LANES * 4)
                e.store(sums[i * num_vectors + j], place)

    return tile


@emitted
def multiply_by_scales(builder, numbers, scales, offset, num_vectors):
    """Multiplies a row's numbers for some vectors of keys, in place.

    numbers: address of `num_vectors` (at least one) vectors of float32.
    scales: address of a table of addresses; `offset` bytes behind each lies a vector of scales.
    """
    e = Emitter(builder)
    loop = Loop(e, e.const(0), num_vectors, 1)
    loop.begin([])
    place = e.at(numbers, builder.mul(loop.index, e.const(4 * LANES)))
    address = e.load_word(e.at(scales, builder.mul(loop.index, e.const(8))))
    e.store(builder.fmul(e.load(place), e.load(e.at(address, offset))), place)
    loop.end([])


@cache
def output_tile(num_rows: int, num_vectors: int):
    """Returns an emitter of ``out = out * factor + weights @ values``, with one factor per row.

    The emitter is tile(weights, values, skip, num_key_vectors, first, last, whole, stride, factors,
    out, out_stride, behind, kind). It also prefetches.

    weights: address of float32 [num_rows, SCORES_STRIDE].
    values: address of a table with the addresses of the values of each vector of keys. The
        addresses KEY_VECTORS entries further, plus `behind` bytes, are prefetched.
    skip: bytes at the beginning of each value that are not read.
    num_key_vectors: the number of vectors of keys.
    first: the first key of the first vector that is read.
    last: the end of the keys of the last vector that are read.
    whole: the number of keys in a vector.
    stride: bytes from one key's value to the next.
    factors: address of float32 [num_rows].
    out: address of float32 [num_rows, ...], with `out_stride` bytes between rows.
    """

    @emitted
    def tile(
        builder, weights, values, skip, num_key_vectors, first, last, whole, stride, factors, out,
        out_stride, behind, kind,
    ):  # fmt: skip
        num_bytes = STORED[kind][1]
        e = Emitter(builder)
        places = [
            e.at(e.at(out, builder.mul(out_stride, e.const(i))), j * LANES * 4)
            for i in range(num_rows)
            for j in range(num_vectors)
        ]
        sums = []
        for i in range(num_rows):
            factor = e.broadcast(e.load_scalar(e.at(factors, 4 * i)))
            for place in places[i * num_vectors : (i + 1) * num_vectors]:
                sums.append(builder.fmul(e.load(place), factor))
        outer = Loop(e, e.const(0), num_key_vectors, 1)
        outer.begin(sums)
        is_first = builder.icmp_signed("==", outer.index, e.const(0))
        following = builder.add(outer.index, e.const(1))
        is_last = builder.icmp_signed("==", following, num_key_vectors)
        begin = builder.select(is_first, first, e.const(0))
        end = builder.select(is_last, last, whole)
        at = e.at(values, builder.mul(outer.index, e.const(8)))
        base, soon = e.load_word(at), e.load_word(e.at(at, 8 * KEY_VECTORS))
        base = builder.add(base, skip)
        soon = builder.add(builder.add(soon, skip), behind)
        row = e.at(weights, builder.mul(outer.index, e.const(LANES * 4)))
        inner = Loop(e, begin, end, 1)
        inner.begin(outer.values)
        offset = builder.mul(inner.index, stride)
        value_at = e.at(base, offset)
        for line in range(0, num_vectors * LANES * num_bytes, 64):
            e.prefetch(e.at(e.at(soon, offset), line))
        weight_at = e.at(row, builder.mul(inner.index, e.const(4)))
        rows = [e.at(weight_at, i * SCORES_STRIDE) for i in range(num_rows)]
        places_of_columns = [e.at(value_at, j * LANES * num_bytes) for j in range(num_vectors)]
        columns = [e.load(place, kind) for place in places_of_columns]
        sums = _add_products(e, rows, columns, inner.values)
        inner.end(sums)
        outer.end(sums)
        for place, value in zip(places, sums, strict=True):
            e.store(value, place)

    return tile
