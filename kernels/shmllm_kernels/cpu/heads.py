"""The kernel between the qkv projection and attention.

It applies RMSNorm to query, key and value heads if the model has such norms, applies rotary
embedding (`reference.rope` has the formulas) if the layer has one, and writes keys and values to
the cache, if the layer has its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.cache_layout import IN_TILES, TILE_KEYS
from shmllm_kernels.cpu.head_tiles import store_tile, store_token_in_tiles
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    itemsize,
    number,
    put_number,
    word,
)
from shmllm_kernels.cpu.norms import mean_of
from shmllm_kernels.cpu.rounding import (
    LARGEST,
    inverse_scale,
    largest_magnitude,
    put_byte,
    rounded_byte,
)
from shmllm_kernels.cpu.shuffles import transposed
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop

TOKENS_AT_ONCE = 128
"""The largest number of tokens in one piece of work."""

CAN_TRANSPOSE = LANES == 16
"""Whether the keys of as many tokens as a vector has lanes are written by vectors."""


class Norm(NamedTuple):
    """The norm of query heads, of key heads, or of value heads."""

    weight: int  # address, or 0
    eps: float
    offset: Any  # float32
    extent: int  # 0: over each head; 1: over all side by side; 2: over each, with own weights
    centering: int  # 0: an RMSNorm; 1: a LayerNorm; 2: a LayerNorm with a bias behind the weights


@emitted
def sum_of_squares(builder, address, count):
    """Returns the sum of squares of `count` float32, at least one. The order of additions depends
    on `count` alone."""
    e = Emitter(builder)
    loop = Loop(e, e.const(0), count, LANES)
    loop.begin([e.zeros()])
    place = e.at(address, builder.mul(loop.index, e.const(4)))
    value = e.load_first(place, builder.sub(count, loop.index))
    total = e.fma(value, value, loop.values[0])
    loop.end([total])
    return e.sum(total)


@compiled
def _normalise(row, width, norm, first, kind):
    """Normalises a part of a row. first: the index of its first weight."""
    values = floats(row)
    if norm.centering != 0:
        center = mean_of(row, width)
        for i in range(width):
            values[i] -= center
    mean = sum_of_squares(row, width) / np.float32(width)
    scale = np.float32(1.0) / np.sqrt(mean + norm.eps)
    for i in range(width):
        values[i] = values[i] * scale * (number(norm.weight, first + i, kind) + norm.offset)
    if norm.centering == 2:
        for i in range(width):
            values[i] += number(norm.weight, width + i, kind)


@compiled
def _normalise_heads(row, num_heads, head_dim, norm, kind):
    """Normalises each head, or all heads side by side. row: address of the first."""
    if norm.weight != 0:
        count = num_heads * head_dim
        width = count if norm.extent == 1 else head_dim
        for first in range(0, count, width):
            _normalise(row + 4 * first, width, norm, first if norm.extent == 2 else 0, kind)


@compiled
def rotate(head, num_pairs, is_interleaved, cos, sin):
    """Rotates the first pairs of a head in place; `STORE_HEADS` explains the operands."""
    cosines, sines = floats(cos), floats(sin)
    if is_interleaved != 0:
        pairs = floats(head)
        for i in range(num_pairs):
            a, b, c, s = pairs[2 * i], pairs[2 * i + 1], cosines[i], sines[i]
            pairs[2 * i] = a * c - b * s
            pairs[2 * i + 1] = b * c + a * s
    else:
        low, high = floats(head), floats(head + 4 * num_pairs)
        for i in range(num_pairs):
            a, b, c, s = low[i], high[i], cosines[i], sines[i]
            low[i] = a * c - b * s
            high[i] = b * c + a * s


@compiled
def _put_all(source, count, out, first, step, kind):
    """Writes numbers to ``out[first + i * step]``; returns their scale, for int8."""
    numbers = floats(source)
    if kind == "int8":
        largest = largest_magnitude(source, count)
        inverse = inverse_scale(largest)
        for i in range(count):
            put_byte(out, first + i * step, rounded_byte(numbers[i], inverse))
        return largest / np.float32(LARGEST)
    for i in range(count):
        put_number(out, first + i * step, numbers[i], kind)
    return np.float32(1.0)


@compiled
def _store_token(heads, row, slot, cache, kind):
    """Writes the keys and values of one token to the cache. row: address of its first key head."""
    num_kv_heads, head_dim = word(heads, at.NUM_KV_HEADS), word(heads, at.HEAD_DIM)
    value_dim, shift = word(heads, at.VALUE_DIM), word(heads, at.BLOCK_SHIFT)
    offset = slot & ((1 << shift) - 1)
    block = cache + (slot >> shift) * word(heads, at.BLOCK_STRIDE)
    stride = word(heads, at.DIMENSION_BYTES) // itemsize(kind)
    first_value = row + 4 * num_kv_heads * head_dim
    for head in range(num_kv_heads):
        keys = block + head * word(heads, at.HEAD_BYTES)
        key, value = row + 4 * head * head_dim, first_value + 4 * head * value_dim
        key_scale = _put_all(key, head_dim, keys, offset, stride, kind)
        values = keys + word(heads, at.KEY_BYTES) + offset * word(heads, at.VALUE_ROW_BYTES)
        value_scale = _put_all(value, value_dim, values, 0, 1, kind)
        if kind == "int8":
            scales = keys + word(heads, at.SCALES_AT)
            of_keys, of_values = floats(scales), floats(scales + word(heads, at.SCALE_ROW_BYTES))
            of_keys[offset] = key_scale
            of_values[offset] = value_scale


@emitted
def store_transposed(builder, rows, stride, head_dim, out, out_stride):
    """Writes the keys of LANES tokens, dimension by dimension.

    Args:
        rows: address of the first token's key, float32 [head_dim].
        stride: bytes from one token's key to the next.
        head_dim: a multiple of LANES.
        out: address of the first dimension, float32 [head_dim, LANES].
        out_stride: bytes from one dimension to the next.
    """
    e = Emitter(builder)
    loop = Loop(e, e.const(0), head_dim, LANES)
    loop.begin([])
    first = e.at(rows, builder.mul(loop.index, e.const(4)))
    vectors = [e.load(e.at(first, builder.mul(stride, e.const(i)))) for i in range(LANES)]
    target = e.at(out, builder.mul(loop.index, out_stride))
    for i, column in enumerate(transposed(e, vectors)):
        e.store(column, e.at(target, builder.mul(out_stride, e.const(i))))
    loop.end([])


@compiled
def _store_vector(heads, row, stride, slot, cache):
    """Writes the keys and values of LANES tokens of one block, in float32. row: address of the
    first key head of the first token."""
    num_kv_heads, head_dim = word(heads, at.NUM_KV_HEADS), word(heads, at.HEAD_DIM)
    value_dim, shift = word(heads, at.VALUE_DIM), word(heads, at.BLOCK_SHIFT)
    offset = slot & ((1 << shift) - 1)
    block = cache + (slot >> shift) * word(heads, at.BLOCK_STRIDE)
    first_value = row + 4 * num_kv_heads * head_dim
    for head in range(num_kv_heads):
        keys = block + head * word(heads, at.HEAD_BYTES)
        store_transposed(
            row + 4 * head * head_dim, stride, head_dim, keys + 4 * offset,
            word(heads, at.DIMENSION_BYTES),
        )  # fmt: skip
        values, row_bytes = keys + word(heads, at.KEY_BYTES), word(heads, at.VALUE_ROW_BYTES)
        for i in range(LANES):
            source = floats(first_value + i * stride + 4 * head * value_dim)
            target = floats(values + (offset + i) * row_bytes)
            for j in range(value_dim):
                target[j] = source[j]


@compiled
def _fill_vector(heads, slots, token, end, count):
    """Whether the tokens from `token` on fill a vector, or a tile, of `count` of a block's keys."""
    if token + count > end:
        return False
    slot = word(slots, token)
    is_run = word(slots, token + count - 1) == slot + count - 1  # slots of a block ascend
    same = slot >> word(heads, at.BLOCK_SHIFT) == (slot + count - 1) >> word(heads, at.BLOCK_SHIFT)
    return is_run & same & (slot % count == 0)


@compiled
def _store_tokens(heads, row, stride, slots, token, end, cache, kind):
    """Writes the keys and values of some tokens from `token` on; returns the token behind them.
    row: address of the first key head of this token."""
    slot = word(slots, token)
    if kind == IN_TILES:
        if _fill_vector(heads, slots, token, end, TILE_KEYS):
            store_tile(heads, row, stride, slot, cache)
            return token + TILE_KEYS
        store_token_in_tiles(heads, row, slot, cache)
        return token + 1
    is_whole = word(heads, at.HEAD_DIM) % LANES == 0
    if (
        CAN_TRANSPOSE
        and kind == "float32"
        and is_whole
        and _fill_vector(heads, slots, token, end, LANES)
    ):
        _store_vector(heads, row, stride, slot, cache)
        return token + LANES
    _store_token(heads, row, slot, cache, kind)
    return token + 1


@compiled
def _chunk(num_tokens, num_threads):
    return max(min(num_tokens // (4 * num_threads), TOKENS_AT_ONCE), 1)


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_tokens = word(word(operands, 0), 0)
    chunk = _chunk(num_tokens, num_threads)
    return (num_tokens + chunk - 1) // chunk


@compiled
def _norm(operands, weight, extent, centering):
    eps, offset = float_of_word(word(operands, 10)), float_of_word(word(operands, 11))
    return Norm(weight, eps, offset, extent, centering)


@compiled
def _store(operands, piece, thread, num_threads, stored, kind):
    num_tokens, heads = word(word(operands, 0), 0), word(operands, 1)
    qkv, qkv_stride, cache = word(operands, 2), word(operands, 3), word(operands, 7)
    q_norm = _norm(operands, word(operands, 8), word(operands, 12), word(operands, 17))
    k_norm = _norm(operands, word(operands, 9), word(operands, 12), word(operands, 17))
    v_norm = Norm(word(operands, 15), q_norm.eps, np.float32(0.0), 0, 0)
    num_pairs, is_interleaved = word(operands, 13), word(operands, 14)
    is_behind = word(operands, 16)
    head_dim, num_heads = word(heads, at.HEAD_DIM), word(heads, at.NUM_HEADS)
    value_dim, num_kv_heads = (
        word(heads, at.VALUE_DIM), word(heads, at.NUM_KV_HEADS) if cache != 0 else 0,
    )  # fmt: skip
    chunk = _chunk(num_tokens, num_threads)
    begin, end = piece * chunk, min((piece + 1) * chunk, num_tokens)
    for token in range(begin, end):
        row = qkv + token * qkv_stride
        keys = row + 4 * num_heads * head_dim
        if is_behind == 0:
            _normalise_heads(row, num_heads, head_dim, q_norm, kind)
            _normalise_heads(keys, num_kv_heads, head_dim, k_norm, kind)
        values = keys + 4 * num_kv_heads * head_dim
        _normalise_heads(values, num_kv_heads, value_dim, v_norm, kind)
        if num_pairs > 0:
            cos = word(operands, 4) + token * num_pairs * 4
            sin = word(operands, 5) + token * num_pairs * 4
            for index in range(num_heads + num_kv_heads):
                rotate(row + 4 * index * head_dim, num_pairs, is_interleaved, cos, sin)
        if is_behind != 0:
            _normalise_heads(row, num_heads, head_dim, q_norm, kind)
            _normalise_heads(keys, num_kv_heads, head_dim, k_norm, kind)
    token, slots = begin, word(operands, 6)
    while cache != 0 and token < end:
        keys = qkv + token * qkv_stride + 4 * num_heads * head_dim
        token = _store_tokens(heads, keys, qkv_stride, slots, token, end, cache, stored)


STORE_HEADS = {kinds: Kernel(_pieces, _store, *kinds) for kinds in [*at.KINDS, *at.TILE_KINDS]}
"""Kernels by the dtype names of the cache and of the norms' weights. They leave the normalised and
rotated queries in the rows of qkv. int8 is rounded to the nearest, ties up, each key and each value
with a scale of its own, its largest magnitude / 127.

Operands (addresses; strides in bytes):

    0  step: int64 words, the first is the number of tokens
    1  heads: words, see `cache_layout.head_words`
    2  qkv: float32 rows, all query heads, then key heads, then value heads, if there are any
    3  the stride of qkv (a number)
    4  cos, 5  sin: float32 [tokens, pairs], of the tokens' positions
    6  slots: int64 [tokens], block * block_size + offset
    7  the layer's cache, see `CacheLayout`; 0: the layer has no keys and values of its own
    8  q_norm, 9  k_norm: the norms' weights, or 0 if the model has none
    10 eps of these norms, and 11 the offset of their weights, numbers from `word_of_float`
    12 0: a norm of queries or keys is over one head, weights [head_dim]; 1: over all query heads or
       all key heads side by side, weights [heads, head_dim]; 2: over one head, weights
       [heads, head_dim] (a number)
    13 pairs: the number of pairs that are rotated in each head, which are its first elements; 0:
       none, and cos and sin are not read (a number)
    14 0: element i belongs to element i + pairs; 1: element 2 i to element 2 i + 1 (a number)
    15 v_norm: the weights of the values' norm, an RMSNorm over one head; or 0 if there is none
    16 0: queries and keys are normalised before the rotation; 1: behind it (a number)
    17 0: their norms are RMSNorms; 1: LayerNorms without a bias; 2: LayerNorms over one head, with
       weights and biases [2, head_dim] (a number)
"""
