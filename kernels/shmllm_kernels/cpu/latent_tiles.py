"""Register tiles of latent attention's two products, for a few query rows and some keys.

Queries and keys are read along their rows. A score adds in LANES lanes, each over every LANES-th
element in their order, and then over the lanes as `Emitter.sums` does; an output adds over the keys
in their order. Both use fused multiply-adds: results do not depend on the number of rows and keys
of a tile.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir

from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.latent_layout import PAIR
from shmllm_kernels.cpu.simd import LANES, NUM_REGISTERS, STORED, Emitter, Loop

TILE_ROWS, TILE_KEYS = (8, 3) if NUM_REGISTERS == 32 else (4, 2)
"""The largest number of rows in a tile, and the number of keys in a tile of scores: the sums and
the operands fit into the registers, and many rows share the conversion of a key to float32."""


def _load_pair(e: Emitter, address: ir.Value, kind: str) -> tuple[ir.Value, ir.Value]:
    """Loads PAIR elements of a row as two vectors of float32."""
    if kind != "bfloat16":
        return e.load(address, kind), e.load(e.at(address, LANES * STORED[kind][1]), kind)
    pointer = e.builder.inttoptr(address, e.integers.as_pointer())
    both = e.builder.load(pointer, align=4)
    low = e.builder.shl(both, e.splat_int(16))
    high = e.builder.and_(both, e.splat_int(-(1 << 16)))
    return e.builder.bitcast(low, e.vector), e.builder.bitcast(high, e.vector)


@cache
def score_tile(num_rows: int):
    """Returns an emitter of the scores of some rows with TILE_KEYS keys.

    The emitter is tile(query, query_stride, keys, width, out, out_stride, kind).

    query: address of float32 rows, `query_stride` bytes apart.
    keys: address of a table with the keys' addresses. It also prefetches the keys that follow in
        the table.
    width: the number of elements, whole pairs of vectors.
    out: address of float32 rows of scores, `out_stride` bytes apart.
    kind: the dtype name of the keys.
    """

    @emitted
    def tile(builder, query, query_stride, keys, width, out, out_stride, kind):
        num_bytes = STORED[kind][1]
        e = Emitter(builder)
        queries = [e.at(query, builder.mul(query_stride, e.const(i))) for i in range(num_rows)]
        table = [e.load_word(e.at(keys, 8 * j)) for j in range(2 * TILE_KEYS)]
        loop = Loop(e, e.const(0), width, PAIR)
        loop.begin([e.zeros()] * (num_rows * TILE_KEYS))
        key_at = builder.mul(loop.index, e.const(num_bytes))
        query_at = builder.mul(loop.index, e.const(4))
        for address in table[TILE_KEYS:]:
            e.prefetch(e.at(address, key_at))
        pairs = [_load_pair(e, e.at(address, key_at), kind) for address in table[:TILE_KEYS]]
        sums = list(loop.values)
        for half in range(2):
            for i, row in enumerate(queries):
                value = e.load(e.at(e.at(row, query_at), half * LANES * 4))
                for j, pair in enumerate(pairs):
                    at = i * TILE_KEYS + j
                    sums[at] = e.fma(value, pair[half], sums[at])
        loop.end(sums)
        for i, scores in enumerate(e.sums(sums, TILE_KEYS)):
            e.store_first(scores, e.at(out, builder.mul(out_stride, e.const(i))), TILE_KEYS)

    return tile


@cache
def value_tile(num_rows: int):
    """Returns an emitter of ``out = out * factor + weights @ values`` for PAIR columns, with one
    factor per row.

    The emitter is tile(weights, weight_stride, values, skip, count, factors, out, out_stride,
    kind).

    weights: address of float32 rows, `weight_stride` bytes apart.
    values: address of a table with the addresses of `count` values (at least one); `skip` bytes at
        the beginning of each are not read.
    factors: address of float32 [num_rows].
    out: address of float32 rows, `out_stride` bytes apart.
    kind: the dtype name of the values.
    """

    @emitted
    def tile(
        builder, weights, weight_stride, values, skip, count, factors, out, out_stride, kind
    ):  # fmt: skip
        e = Emitter(builder)
        places = [
            e.at(e.at(out, builder.mul(out_stride, e.const(i))), half * LANES * 4)
            for i in range(num_rows)
            for half in range(2)
        ]
        rows = [e.at(weights, builder.mul(weight_stride, e.const(i))) for i in range(num_rows)]
        sums = []
        for i in range(num_rows):
            factor = e.broadcast(e.load_scalar(e.at(factors, 4 * i)))
            sums += [builder.fmul(e.load(place), factor) for place in places[2 * i : 2 * i + 2]]
        loop = Loop(e, e.const(0), count, 1)
        loop.begin(sums)
        value = e.load_word(e.at(values, builder.mul(loop.index, e.const(8))))
        pair = _load_pair(e, e.at(value, skip), kind)
        weight_at, sums = builder.mul(loop.index, e.const(4)), list(loop.values)
        for i, row in enumerate(rows):
            weight = e.broadcast(e.load_scalar(e.at(row, weight_at)))
            for half in range(2):
                sums[2 * i + half] = e.fma(weight, pair[half], sums[2 * i + half])
        loop.end(sums)
        for place, total in zip(places, sums, strict=True):
            e.store(total, place)

    return tile
