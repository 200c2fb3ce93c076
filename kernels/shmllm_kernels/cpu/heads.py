"""The kernel between the qkv projection and attention.

It applies RMSNorm to each query and key head if the model has such norms, applies rotary embedding
(`reference.rope` has the formula), and writes keys and values to the cache.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu import cache_layout as at
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
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop

TOKENS_AT_ONCE = 8
"""The largest number of tokens in one piece of work."""


@emitted
def _sum_of_squares(builder, address, count):
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
def _normalise(head, head_dim, weight, eps, kind):
    values = floats(head)
    mean = _sum_of_squares(head, head_dim) / np.float32(head_dim)
    scale = np.float32(1.0) / np.sqrt(mean + eps)
    for i in range(head_dim):
        values[i] = values[i] * scale * number(weight, i, kind)


@compiled
def _rotate(head, half, cos, sin):
    low, high = floats(head), floats(head + 4 * half)
    cosines, sines = floats(cos), floats(sin)
    for i in range(half):
        a, b, c, s = low[i], high[i], cosines[i], sines[i]
        low[i] = a * c - b * s
        high[i] = b * c + a * s


@compiled
def _store_token(heads, row, slot, cache, kind):
    """Writes the keys and values of one token to the cache. row: address of its first key head."""
    num_kv_heads, head_dim = word(heads, at.NUM_KV_HEADS), word(heads, at.HEAD_DIM)
    shift = word(heads, at.BLOCK_SHIFT)
    offset = slot & ((1 << shift) - 1)
    block = cache + (slot >> shift) * word(heads, at.BLOCK_BYTES)
    stride = word(heads, at.DIMENSION_BYTES) // itemsize(kind)
    for head in range(num_kv_heads):
        keys = block + head * word(heads, at.HEAD_BYTES)
        key = floats(row + 4 * head * head_dim)
        for i in range(head_dim):
            put_number(keys, i * stride + offset, key[i], kind)
        values = keys + word(heads, at.KEY_BYTES) + offset * word(heads, at.VALUE_ROW_BYTES)
        value = floats(row + 4 * (num_kv_heads + head) * head_dim)
        for i in range(head_dim):
            put_number(values, i, value[i], kind)


@compiled
def _chunk(num_tokens, num_threads):
    return max(min(num_tokens // (4 * num_threads), TOKENS_AT_ONCE), 1)


@compiled
def _pieces(operands, piece, thread, num_threads):
    num_tokens = word(word(operands, 0), 0)
    chunk = _chunk(num_tokens, num_threads)
    return (num_tokens + chunk - 1) // chunk


@compiled
def _store(operands, piece, thread, num_threads, kind):
    num_tokens, heads = word(word(operands, 0), 0), word(operands, 1)
    qkv, qkv_stride, cache = word(operands, 2), word(operands, 3), word(operands, 7)
    q_norm, k_norm, eps = word(operands, 8), word(operands, 9), float_of_word(word(operands, 10))
    head_dim, num_kv_heads = word(heads, at.HEAD_DIM), word(heads, at.NUM_KV_HEADS)
    num_heads = word(heads, at.NUM_HEADS)
    half = head_dim // 2
    chunk = _chunk(num_tokens, num_threads)
    for token in range(piece * chunk, min((piece + 1) * chunk, num_tokens)):
        row = qkv + token * qkv_stride
        cos = word(operands, 4) + token * half * 4
        sin = word(operands, 5) + token * half * 4
        for index in range(num_heads + num_kv_heads):
            head = row + 4 * index * head_dim
            norm = q_norm if index < num_heads else k_norm
            if norm != 0:
                _normalise(head, head_dim, norm, eps, kind)
            _rotate(head, half, cos, sin)
        slot = word(word(operands, 6), token)
        _store_token(heads, row + 4 * num_heads * head_dim, slot, cache, kind)


STORE_HEADS = {
    "float32": Kernel(_pieces, _store, "float32"),
    "float16": Kernel(_pieces, _store, "float16"),
    "bfloat16": Kernel(_pieces, _store, "bfloat16"),
}
"""Kernels by the dtype name of the cache and of the norms' weights. They leave the normalised and
rotated queries in the rows of qkv.

Operands (addresses; strides in bytes):

    0  step: int64 words, the first is the number of tokens
    1  heads: words, see `cache_layout.head_words`
    2  qkv: float32 rows, all query heads, then key heads, then value heads
    3  the stride of qkv (a number)
    4  cos, 5  sin: float32 [tokens, head_dim / 2], of the tokens' positions
    6  slots: int64 [tokens], block * block_size + offset
    7  the layer's cache, see `CacheLayout`
    8  q_norm, 9  k_norm: weights [head_dim], or 0 if the model has none
    10 eps of these norms, a number from `word_of_float`
"""
