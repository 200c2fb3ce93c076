"""The two products of attention, for a few rows of queries and some vectors of keys.

Accumulators fill the vector registers. A score is summed over dimensions in their order, an output
over keys in their order, each by multiply-adds: neither depends on how many rows and vectors
a tile has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llvmlite import ir

from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.simd import LANES, NUM_REGISTERS, STORED, Emitter, Loop

KEY_VECTORS = 8
"""Vectors of keys between two updates of the softmax. At absolute positions."""

SCORES_STRIDE = KEY_VECTORS * LANES * 4
"""Bytes from one row of scores to the next."""

_REGISTERS_FOR_TILES = NUM_REGISTERS * 7 // 8


def widest(num_rows: int) -> int:
    """How many vectors a tile of that many rows has: its sums and one row of operands stay in
    registers. With fewer left over, LLVM keeps a sum in memory."""
    return max(width for width in (1, 2, 4, 8) if width * (num_rows + 1) <= _REGISTERS_FOR_TILES)


def _add_products(
    e: Emitter, rows: Sequence[ir.Value], columns: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> list[ir.Value]:
    """``sums[i, j] + rows[i] * columns[j]``. rows: addresses of floats."""
    out = []
    for i, row in enumerate(rows):
        factor = e.broadcast(e.load_scalar(row))
        for j, column in enumerate(columns):
            out.append(e.fma(factor, column, sums[i * len(columns) + j]))
    return out


@cache
def scores(num_rows: int, num_vectors: int):
    """
    tile(query, keys, stride, head_dim, out, behind, kind)

    query: address of float32 [head_dim, num_rows]. keys: address of the addresses of vectors
    in their first dimension; `stride` bytes from one dimension to the next. out: of float32
    [num_rows, SCORES_STRIDE]. `behind`: bytes from what is read to what is needed soon.
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


@cache
def outputs(num_rows: int, num_vectors: int):
    """
    tile(weights, values, skip, num_key_vectors, first, last, whole, stride, factors, out,
         out_stride, behind, kind)

    values: address of the addresses of what belongs to each vector of `whole` keys, `stride` bytes
    from one key to the next, of which `skip` are not read; from key `first` of the first vector
    up to, not including, `last` of the last. weights: float32 [num_rows, SCORES_STRIDE]. ``out``
    [num_rows, ...] float32 becomes ``out * factor + weights @ values``, with a factor for each
    row. KEY_VECTORS addresses further on lies what is needed next, `behind` bytes behind those.
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
