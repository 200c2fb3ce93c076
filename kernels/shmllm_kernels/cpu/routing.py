"""Kernels that decide which experts compute which tokens, and that add up what these return.

A pair is a token and one of its `top_k` experts. ROUTE chooses each token's experts, SORT lays the
pairs out expert by expert for `experts`, COMBINE adds the pairs of each token. A token's result
depends on that token alone: it is the sum over its experts in ascending order.
"""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.functions import exp, sigmoid
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, number, put_word, word
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.products import ROWS_AT_ONCE

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
def _pieces(operands, piece, thread, num_threads):
    num_tokens = word(word(operands, 0), 0)
    chunk = _chunk(num_tokens, num_threads)
    return (num_tokens + chunk - 1) // chunk


@compiled
def _tokens(operands, piece, num_threads):
    """Returns the bounds [begin, end) of a piece's tokens."""
    num_tokens = word(word(operands, 0), 0)
    chunk = _chunk(num_tokens, num_threads)
    return piece * chunk, min((piece + 1) * chunk, num_tokens)


@compiled
def _rank(logit):
    return logit if logit == logit else np.float32(-math.inf)


@compiled
def _is_chosen_before(rank, expert, other_rank, other):
    return rank > other_rank or (rank == other_rank and expert < other)


@compiled
def _last_chosen(logits, num_experts, top_k):
    """Returns the expert that is chosen last.

    Each round finds the first expert behind that of the round before. This needs no memory for
    the choice, and `top_k` rounds take less time than the experts by some orders of magnitude.
    """
    values = floats(logits)
    last_rank, last = np.float32(math.inf), np.int64(-1)
    for _ in range(top_k):
        best_rank, best = np.float32(-math.inf), num_experts
        for expert in range(num_experts):
            rank = _rank(values[expert])
            is_left = _is_chosen_before(last_rank, last, rank, expert)
            if is_left and _is_chosen_before(rank, expert, best_rank, best):
                best_rank = rank
                best = expert
        last_rank = best_rank
        last = best
    return last


@compiled
def _largest(logits, count):
    values = floats(logits)
    largest = np.float32(-math.inf)
    for i in range(count):
        largest = max(largest, _rank(values[i]))
    return largest


@compiled
def _route_token(logits, num_experts, top_k, divides_by_all, ids, weights):
    values, shares = floats(logits), floats(weights)
    largest = _largest(logits, num_experts)
    last = _last_chosen(logits, num_experts, top_k)
    last_rank = _rank(values[last])
    total = np.float32(0.0)
    num_chosen = np.int64(0)
    for expert in range(num_experts):
        logit = values[expert]
        share = exp(logit - largest)
        is_chosen = _is_chosen_before(_rank(logit), expert, last_rank, last + 1)
        if divides_by_all != 0 or is_chosen:
            total += share
        if logit != logit:
            total = logit
        if is_chosen:
            put_word(ids, num_chosen, expert)
            shares[num_chosen] = share
            num_chosen += 1
    for i in range(top_k):
        shares[i] = shares[i] / total


@compiled
def _route(operands, piece, thread, num_threads):
    logits, stride, num_experts = word(operands, 1), word(operands, 2), word(operands, 3)
    top_k, divides_by_all = word(operands, 4), word(operands, 5)
    ids, weights = word(operands, 6), word(operands, 7)
    begin, end = _tokens(operands, piece, num_threads)
    for token in range(begin, end):
        _route_token(
            logits + token * stride, num_experts, top_k, divides_by_all,
            ids + token * top_k * 8, weights + token * top_k * 4,
        )  # fmt: skip


ROUTE = Kernel(_pieces, _route)
"""Chooses each token's experts, those with the largest logits; of equal ones the lower expert.

``weight = exp(logit) / sum(exp(logits))``, where the sum is over all experts or over the chosen
ones. The latter is both the softmax of the chosen logits, and the softmax of all logits divided by
the sum over the chosen ones.

A NaN is chosen last; all weights of its token are NaN then, as they are if the largest logit is
infinite.

Operands: address of the number of tokens; logits [tokens, experts] float32, their stride in bytes;
the number of experts; top_k, at most that number; whether the sum is over all experts; ids
[tokens, top_k] int64, in ascending order; weights [tokens, top_k] float32.
"""


@compiled
def _one_piece(operands, piece, thread, num_threads):
    return 1


@compiled
def _sort(operands, piece, thread, num_threads):
    num_tokens, ids = word(word(operands, 0), 0), word(operands, 1)
    num_experts, top_k, firsts = word(operands, 2), word(operands, 3), word(operands, 4)
    tokens, places = word(operands, 5), word(operands, 6)
    blocks, num_blocks = word(operands, 7), np.int64(0)
    for expert in range(num_experts):
        put_word(firsts, expert, 0)
    for pair in range(num_tokens * top_k):
        expert = word(ids, pair)
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
    for token in range(num_tokens):
        for choice in range(top_k):
            pair = token * top_k + choice
            expert = word(ids, pair)
            place = word(firsts, expert)
            put_word(firsts, expert, place + 1)
            put_word(tokens, place, token)
            put_word(places, pair, place)
    put_word(word(operands, 8), 0, num_blocks)


SORT = Kernel(_one_piece, _sort)
"""Sorts the pairs by expert, those of one expert by token (counting sort).

Operands: address of the number of tokens; ids [tokens, top_k] int64; the number of experts; top_k;
scratch [experts] int64; tokens [tokens * top_k] int64, the token of each sorted pair; places
[tokens, top_k] int64, the index of each pair among the sorted ones; blocks [max_blocks,
BLOCK_WORDS] int64; the address of the number of blocks.
"""


@compiled
def _add_row(out, factor, source, width):
    values, addends = floats(out), floats(source)
    for i in range(width):
        values[i] += factor * addends[i]


@compiled
def _combine(operands, piece, thread, num_threads):
    top_k, places, weights = word(operands, 1), word(operands, 2), word(operands, 3)
    rows, out, width = word(operands, 4), word(operands, 5), word(operands, 6)
    shared, gates, gate_stride = word(operands, 7), word(operands, 8), word(operands, 9)
    begin, end = _tokens(operands, piece, num_threads)
    for token in range(begin, end):
        target = out + token * width * 4
        values = floats(target)
        for i in range(width):
            values[i] = np.float32(0.0)
        for pair in range(token * top_k, (token + 1) * top_k):
            _add_row(target, floats(weights)[pair], rows + word(places, pair) * width * 4, width)
        if shared != 0:
            gate = floats(gates + token * gate_stride)
            factor = sigmoid(gate[0]) if gates != 0 else np.float32(1.0)
            _add_row(target, factor, shared + token * width * 4, width)


COMBINE = Kernel(_pieces, _combine)
"""``out[token] = sum(weights[token, i] * rows[places[token, i]]) + sigmoid(gate) * shared[token]``,
added in this order.

Operands: address of the number of tokens; top_k; places [tokens, top_k] int64; weights [tokens,
top_k] float32; rows [tokens * top_k, width]; out [tokens, width]; width; shared [tokens, width] or
0; gates or 0 for a factor of 1, one float32 for each token, their stride in bytes. All but places
are float32.
"""


@compiled
def _scale_chosen(operands, piece, thread, num_threads, kind):
    top_k, ids, scales = word(operands, 1), word(operands, 2), word(operands, 4)
    weights = floats(word(operands, 3))
    begin, end = _tokens(operands, piece, num_threads)
    for pair in range(begin * top_k, end * top_k):
        weights[pair] *= number(scales, word(ids, pair), kind)


SCALE_CHOSEN = {kind: Kernel(_pieces, _scale_chosen, kind) for kind in KINDS}
"""Kernels by the dtype name of the scales. ``weights *= scales[ids]``, in place.

Operands: address of the number of tokens; top_k; ids [tokens, top_k] int64; weights [tokens, top_k]
float32; scales [experts].
"""
