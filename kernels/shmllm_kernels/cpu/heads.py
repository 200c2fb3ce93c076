"""Heads of queries, keys and values between their projection and attention.

Root mean square norm of each query and key head where the model has it, rotary embedding
(`shmllm_kernels.rope` has the formula), and keys and values into the cache.
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
"""What a thread takes at a time, at most."""


@emitted
def _sum_of_squares(builder, address, count):
    """Of float32, in an order that depends on `count` alone. At least one."""
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
    """Keys and values of one token. row: address of its first key head."""
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
"""By the kind of the cache and of the norms' weights. Queries stay, finished, in their rows.

Operands, addresses but for numbers (strides in bytes):

    0  step: words, the first the number of tokens
    1  heads: words, see `cache_layout.head_words`
    2  qkv: float32 rows, all heads of queries, then of keys, then of values    3  its stride
    4  cos, 5  sin: float32 [tokens, head_dim / 2], of the tokens' positions
    6  slots: int64 [tokens], block * block_size + offset
    7  the layer's cache, see `CacheLayout`
    8  q_norm, 9  k_norm: weights [head_dim], or 0 where the model has none
    10 eps of these norms, by `word_of_float`
"""
