"""Register tiles of latent attention's two products, for a few query rows and some keys.

Queries and keys are read along their rows. A score adds in LANES lanes, each over every LANES-th
element in their order, and then over the lanes as `Emitter.sums` does; an output adds over the keys
in their order. Both use fused multiply-adds: results do not depend on the number of rows and keys
of a tile.
"""

from __future__ import annotations

from functools import cache

from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.simd import LANES, NUM_REGISTERS, STORED, Emitter, Loop

TILE_KEYS = 4
"""The number of keys in a tile of scores."""

TILE_VECTORS = 4
"""The number of vectors of values in a tile of outputs."""

TILE_ROWS = (NUM_REGISTERS - TILE_KEYS - 2) // TILE_KEYS
"""The largest number of rows in a tile: its sums and operands fit into the registers."""


@cache
def score_tile(num_rows: int):
    """Returns an emitter of the scores of some rows with TILE_KEYS keys.

    The emitter is tile(query, query_stride, keys, width, out, out_stride, kind).

    query: address of float32 rows, `query_stride` bytes apart.
    keys: address of a table with the keys' addresses. It also prefetches the keys that follow in
        the table.
    width: the number of elements, whole vectors.
    out: address of float32 rows of scores, `out_stride` bytes apart.
    kind: the dtype name of the keys.
    """

    @emitted
    def tile(builder, query, query_stride, keys, width, out, out_stride, kind):
        num_bytes = STORED[kind][1]
        e = Emitter(builder)
        queries = [e.at(query, builder.mul(query_stride, e.const(i))) for i in range(num_rows)]
        table = [e.load_word(e.at(keys, 8 * j)) for j in range(2 * TILE_KEYS)]
        loop = Loop(e, e.const(0), width, LANES)
        loop.begin([e.zeros()] * (num_rows * TILE_KEYS))
        key_at = builder.mul(loop.index, e.const(num_bytes))
        query_at = builder.mul(loop.index, e.const(4))
        for address in table[TILE_KEYS:]:
            e.prefetch(e.at(address, key_at))
        columns = [e.load(e.at(address, key_at), kind) for address in table[:TILE_KEYS]]
        sums = []
        for i, row in enumerate(queries):
            value = e.load(e.at(row, query_at))
            old = loop.values[i * TILE_KEYS : (i + 1) * TILE_KEYS]
            sums += [e.fma(value, column, own) for column, own in zip(columns, old, strict=True)]
        loop.end(sums)
        for i, scores in enumerate(e.sums(sums, TILE_KEYS)):
            e.store_first(scores, e.at(out, builder.mul(out_stride, e.const(i))), TILE_KEYS)

    return tile


@cache
def value_tile(num_rows: int, num_vectors: int):
    """Returns an emitter of ``out = out * factor + weights @ values``, with one factor per row.

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
        num_bytes = STORED[kind][1]
        e = Emitter(builder)
        places = [
            e.at(e.at(out, builder.mul(out_stride, e.const(i))), j * LANES * 4)
            for i in range(num_rows)
            for j in range(num_vectors)
        ]
        rows = [e.at(weights, builder.mul(weight_stride, e.const(i))) for i in range(num_rows)]
        sums = []
        for i in range(num_rows):
            factor = e.broadcast(e.load_scalar(e.at(factors, 4 * i)))
            for place in places[i * num_vectors : (i + 1) * num_vectors]:
                sums.append(builder.fmul(e.load(place), factor))
        loop = Loop(e, e.const(0), count, 1)
        loop.begin(sums)
        value = e.at(e.load_word(e.at(values, builder.mul(loop.index, e.const(8)))), skip)
        columns = [e.load(e.at(value, j * LANES * num_bytes), kind) for j in range(num_vectors)]
        weight_at, sums = builder.mul(loop.index, e.const(4)), []
        for i, row in enumerate(rows):
            weight = e.broadcast(e.load_scalar(e.at(row, weight_at)))
            old = loop.values[i * num_vectors : (i + 1) * num_vectors]
            sums += [e.fma(weight, column, own) for column, own in zip(columns, old, strict=True)]
        loop.end(sums)
        for place, value in zip(places, sums, strict=True):
            e.store(value, place)

    return tile
