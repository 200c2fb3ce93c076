"""Kernels that lay pairs out by expert, and that add up what experts return.

A pair is a token and one of its `top_k` experts, which `routing.ROUTE` chooses. SORT lays the pairs
out expert by expert for `experts`, COMBINE adds the pairs of each token. A token's result depends
on that token alone: it is the sum over its experts in ascending order.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.functions import sigmoid
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, put_word, word
from shmllm_kernels.cpu.product_tiles import IN_ORDER, LISTED
from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from shmllm_kernels.cpu.rows import add_times

TOKENS_AT_ONCE = 8
"""The largest number of tokens in one piece of work."""

BLOCK_WORDS = 3
"""A block is a piece of the sorted pairs that belong to one expert, as int64: the expert, the first
pair, and the number of pairs, at most ROWS_AT_ONCE."""


def max_blocks(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Returns the largest number of blocks that SORT makes of this many tokens."""
    return num_experts + num_tokens * top_k // ROWS_AT_ONCE


@compiled
def _chunk(num_tokens, num_threads):
    return max(min(num_tokens // (4 * num_threads), TOKENS_AT_ONCE), 1)


@compiled
def pieces_of_tokens(operands, piece, thread, num_threads):
    num_tokens = word(word(operands, 0), 0)
    chunk = _chunk(num_tokens, num_threads)
    return (num_tokens + chunk - 1) // chunk


@compiled
def tokens_of_piece(operands, piece, num_threads):
    """Returns the bounds [begin, end) of a piece's tokens."""
    num_tokens = word(word(operands, 0), 0)
    chunk = _chunk(num_tokens, num_threads)
    return piece * chunk, min((piece + 1) * chunk, num_tokens)


@compiled
def _one_piece(operands, piece, thread, num_threads):
    return 1


@compiled
def _sort(operands, piece, thread, num_threads, order):
    num_tokens, ids = word(word(operands, 0), 0), word(operands, 1)
    num_experts, top_k, firsts = word(operands, 2), word(operands, 3), word(operands, 4)
    tokens, places = word(operands, 5), word(operands, 6)
    blocks, num_blocks = word(operands, 7), np.int64(0)
    for expert in range(num_experts):
        put_word(firsts, expert, 0)
    for pair in range(num_tokens * top_k):
        expert = word(ids, pair)
        if expert >= 0:
            put_word(firsts, expert, word(firsts, expert) + 1)
    first = np.int64(0)
    for expert in range(num_experts):
        end = first + word(firsts, expert)
        put_word(firsts, expert, first)
        while first < end:
            block = blocks + num_blocks * (8 * BLOCK_WORDS)
            count = min(end - first, ROWS_AT_ONCE)
            put_word(block, 0, expert)
            put_word(block, 1, first)
            put_word(block, 2, count)
            first += count
            num_blocks += 1
    for index in range(num_tokens):
        token = index if order == IN_ORDER else word(word(operands, 9), index)
        for choice in range(top_k):
            pair = token * top_k + choice
            expert, place = word(ids, pair), np.int64(-1)
            if expert >= 0:
                place = word(firsts, expert)
                put_word(firsts, expert, place + 1)
                put_word(tokens, place, token)
            put_word(places, pair, place)
    put_word(word(operands, 8), 0, num_blocks)
    put_word(word(operands, 8), 1, first)


SORT = Kernel(_one_piece, _sort, IN_ORDER)
"""Sorts the pairs by expert, those of one expert by token (counting sort).

Operands: address of the number of tokens; ids [tokens, top_k] int64, of which -1 is left out; the
number of experts; top_k; scratch [experts] int64; tokens [tokens * top_k] int64, the token of each
sorted pair; places [tokens, top_k] int64, the index of each pair among the sorted ones, or -1;
blocks [max_blocks, BLOCK_WORDS] int64; the address of two int64, the numbers of blocks and of
sorted pairs.
"""

SORT_LISTED = Kernel(_one_piece, _sort, LISTED)
"""Sorts the pairs by expert, those of one expert in an order of the tokens that is given.

Operands: those of SORT; the tokens in their order, [tokens] int64.
"""


@compiled
def _combine(operands, piece, thread, num_threads):
    top_k, places, weights = word(operands, 1), word(operands, 2), word(operands, 3)
    rows, out, width = word(operands, 4), word(operands, 5), word(operands, 6)
    shared, gates, gate_stride = word(operands, 7), word(operands, 8), word(operands, 9)
    begin, end = tokens_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        target = out + token * width * 4
        values = floats(target)
        for i in range(width):
            values[i] = np.float32(0.0)
        for pair in range(token * top_k, (token + 1) * top_k):
            place = word(places, pair)
            if place >= 0:
                add_times(rows + place * width * 4, floats(weights)[pair], target, width)
        if shared != 0:
            gate = floats(gates + token * gate_stride)
            factor = sigmoid(gate[0]) if gates != 0 else np.float32(1.0)
            add_times(shared + token * word(operands, 10), factor, target, width)


COMBINE = Kernel(pieces_of_tokens, _combine)
"""``out[token] = sum(weights[token, i] * rows[places[token, i]]) + sigmoid(gate) * shared[token]``,
added in this order, without pairs whose place is -1.

Operands: address of the number of tokens; top_k; places [tokens, top_k] int64; weights [tokens,
top_k] float32; rows [tokens * top_k, width]; out [tokens, width]; width; shared [tokens, width] or
0; gates or 0 for a factor of 1, one float32 for each token, their stride in bytes; the stride of
shared in bytes. All but places are float32.
"""
