"""Writes keys and values to a cache for tile instructions; see `cache_layout.IN_TILES`.

A word is two bfloat16: two dimensions of a key, or one dimension of the values of two tokens.
"""

from __future__ import annotations

from llvmlite import ir

from shmllm_kernels.cpu import cache_layout as at
from shmllm_kernels.cpu.bfloat16 import round_to_shorts, round_upper, store_bits, store_halves
from shmllm_kernels.cpu.cache_layout import TILE_DIMS, TILE_KEYS
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.shuffles import transposed_eights
from shmllm_kernels.cpu.simd import INT32, Emitter, Loop

_AT_ONCE = 16
"""The number of dimensions in a vector. Those after the last one are written as zeros."""
_WORDS = _AT_ONCE // 2


def _load(e: Emitter, row: ir.Value, dimension: ir.Value, count: ir.Value) -> ir.Value:
    """Loads the numbers of a head from a dimension on, of `count` in all."""
    place = e.at(row, e.builder.mul(dimension, e.const(4)))
    return e.load_first(place, e.builder.sub(count, dimension))


def _pairs(e: Emitter, numbers: ir.Value) -> ir.Value:
    """Rounds 16 numbers to eight words."""
    return e.builder.bitcast(round_to_shorts(e, numbers), ir.VectorType(INT32, _WORDS))


@emitted
def _put_key(builder, key, count, padded, out, line):
    """Writes one key. padded: its dimensions in the cache; line: the bytes from a pair of them to
    the next."""
    e = Emitter(builder, _AT_ONCE)
    loop = Loop(e, e.const(0), padded, _AT_ONCE)
    loop.begin([])
    words = _pairs(e, _load(e, key, loop.index, count))
    target = e.at(out, builder.mul(builder.lshr(loop.index, e.const(1)), line))
    for i in range(_WORDS):
        one = builder.extract_element(words, ir.Constant(INT32, i))
        store_bits(e, one, e.at(target, builder.mul(line, e.const(i))))
    loop.end([])


@emitted
def _put_value(builder, value, count, out, half):
    """Writes one token's values. out: the words of two tokens, of which this is one (half)."""
    e = Emitter(builder, _AT_ONCE)
    loop = Loop(e, e.const(0), count, _AT_ONCE)
    loop.begin([])
    upper = round_upper(e, _load(e, value, loop.index, count))
    both = builder.or_(upper, builder.lshr(upper, e.splat_int(16)))
    store_halves(e, both, e.at(out, builder.mul(loop.index, e.const(4))), half)
    loop.end([])


@emitted
def _put_keys(builder, keys, stride, count, padded, out, line):
    """Writes the keys of a tile of tokens, which are `stride` bytes apart; see `_put_key`."""
    e = Emitter(builder, _AT_ONCE)
    loop = Loop(e, e.const(0), padded, _AT_ONCE)
    loop.begin([])
    rows = [
        _pairs(e, _load(e, e.at(keys, builder.mul(stride, e.const(i))), loop.index, count))
        for i in range(TILE_KEYS)
    ]
    target = e.at(out, builder.mul(builder.lshr(loop.index, e.const(1)), line))
    for i, column in enumerate(transposed_eights(e, rows)):
        store_bits(e, column, e.at(target, builder.mul(line, e.const(i))))
    loop.end([])


@emitted
def _put_values(builder, values, stride, count, out):
    """Writes the values of two tokens, which are `stride` bytes apart."""
    e = Emitter(builder, _AT_ONCE)
    loop = Loop(e, e.const(0), count, _AT_ONCE)
    loop.begin([])
    low = round_upper(e, _load(e, values, loop.index, count))
    high = round_upper(e, _load(e, e.at(values, stride), loop.index, count))
    words = builder.or_(high, builder.lshr(low, e.splat_int(16)))
    store_bits(e, words, e.at(out, builder.mul(loop.index, e.const(4))))
    loop.end([])


@compiled
def _padded(head_dim):
    """Returns the number of dimensions of a key in the cache: whole steps of products."""
    return (head_dim + TILE_DIMS - 1) // TILE_DIMS * TILE_DIMS


@compiled
def store_token_in_tiles(heads, row, slot, cache):
    """Writes the keys and values of one token. row: address of its first key head."""
    num_kv_heads, head_dim = word(heads, at.NUM_KV_HEADS), word(heads, at.HEAD_DIM)
    padded, value_dim = _padded(head_dim), word(heads, at.VALUE_DIM)
    first_value, shift = row + 4 * num_kv_heads * head_dim, word(heads, at.BLOCK_SHIFT)
    offset = slot & ((1 << shift) - 1)
    block = cache + (slot >> shift) * word(heads, at.BLOCK_STRIDE)
    key_line, value_line = 2 * word(heads, at.DIMENSION_BYTES), 2 * word(heads, at.VALUE_ROW_BYTES)
    for head in range(num_kv_heads):
        keys = block + head * word(heads, at.HEAD_BYTES)
        values = keys + word(heads, at.KEY_BYTES) + (offset >> 1) * value_line
        _put_key(row + 4 * head * head_dim, head_dim, padded, keys + 4 * offset, key_line)
        _put_value(first_value + 4 * head * value_dim, value_dim, values, offset & 1)


@compiled
def store_tile(heads, row, stride, slot, cache):
    """Writes the keys and values of the tokens of a whole tile. row: address of the first key head
    of the first token; stride: bytes from one token to the next."""
    num_kv_heads, head_dim = word(heads, at.NUM_KV_HEADS), word(heads, at.HEAD_DIM)
    padded, value_dim = _padded(head_dim), word(heads, at.VALUE_DIM)
    first_value, shift = row + 4 * num_kv_heads * head_dim, word(heads, at.BLOCK_SHIFT)
    offset = slot & ((1 << shift) - 1)
    block = cache + (slot >> shift) * word(heads, at.BLOCK_STRIDE)
    key_line, value_line = 2 * word(heads, at.DIMENSION_BYTES), 2 * word(heads, at.VALUE_ROW_BYTES)
    for head in range(num_kv_heads):
        keys = block + head * word(heads, at.HEAD_BYTES)
        _put_keys(row + 4 * head * head_dim, stride, head_dim, padded, keys + 4 * offset, key_line)
        values = keys + word(heads, at.KEY_BYTES) + (offset >> 1) * value_line
        source = first_value + 4 * head * value_dim
        for i in range(0, TILE_KEYS, 2):
            _put_values(source + i * stride, stride, value_dim, values + (i >> 1) * value_line)
