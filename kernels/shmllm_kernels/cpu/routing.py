"""Kernels that decide which experts compute which tokens; `pairs` lays these out.

ROUTE chooses each token's experts.
"""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.functions import exp, sigmoid, softplus
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    put_word,
    word,
)
from shmllm_kernels.cpu.pairs import pieces_of_tokens, tokens_of_piece

SOFTMAX, SIGMOID, MIXER = "softmax", "sigmoid", "mixer"
"""What the scores of experts are made of their logits by."""

SQRT_SOFTPLUS = "sqrt softplus"
"""As SIGMOID, with the root of softplus in its place."""

SIGMOID_OF_TOP = "sigmoid of top"
"""As SIGMOID, but logits rank the experts."""

_SMALLEST_SHARE = 1e-12  # ERNIE 4.5 divides by no smaller share of the sum over all experts


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
def _score_of_group(ranks, begin, end, num_best):
    """Returns the largest rank of a group, or the sum of its two largest."""
    values = floats(ranks)
    best, second = np.float32(-math.inf), np.float32(-math.inf)
    for expert in range(begin, end):
        rank = _rank(values[expert])
        second = max(second, min(rank, best))
        best = max(best, rank)
    return best + second if num_best == 2 else best


@compiled
def _keep_best_groups(ranks, num_experts, num_groups, top_groups, num_best):
    """Makes the ranks of all groups but the best ones minus infinity; their scores lie behind."""
    values, size = floats(ranks), num_experts // num_groups
    scores_at = ranks + 4 * num_experts
    scores = floats(scores_at)
    for group in range(num_groups):
        scores[group] = _score_of_group(ranks, group * size, (group + 1) * size, num_best)
    last = _last_chosen(scores_at, num_groups, top_groups)
    last_score = _rank(scores[last])
    for group in range(num_groups):
        is_kept = _is_chosen_before(_rank(scores[group]), group, last_score, last + 1)
        end = (group + 1) * size
        for expert in range(end if is_kept else group * size, end):
            values[expert] = np.float32(-math.inf)


@compiled
def _share(logit, largest, scoring):
    if scoring == SQRT_SOFTPLUS:
        return np.sqrt(softplus(logit))
    return sigmoid(logit) if scoring == SIGMOID else exp(logit - largest)


@compiled
def _write_shares(logits, ranks, num_experts):
    """Writes the softmax of a token's logits; those that are NaN do not count in its sum."""
    source, target = floats(logits), floats(ranks)
    largest, total = _largest(logits, num_experts), np.float32(0.0)
    for expert in range(num_experts):
        logit = source[expert]
        share = _share(logit, largest, SOFTMAX) if logit == logit else np.float32(0.0)
        target[expert] = share if logit == logit else logit
        total += share
    for expert in range(num_experts):
        target[expert] /= total


@compiled
def _write_ranks(logits, ranks, num_experts, scoring):
    """Writes a token's logits, or their scores."""
    source, target = floats(logits), floats(ranks)
    for expert in range(num_experts):
        rank = source[expert]
        if rank == rank:
            if scoring == SIGMOID:
                rank = sigmoid(rank)
            if scoring == SQRT_SOFTPLUS:
                rank = np.sqrt(softplus(rank))
        target[expert] = rank


@compiled
def _rank_experts(operands, logits, ranks, scoring):
    """Writes the numbers by which a token's experts are chosen."""
    num_experts, bias, num_groups = word(operands, 3), word(operands, 9), word(operands, 10)
    if scoring == SOFTMAX and bias != 0:
        _write_shares(logits, ranks, num_experts)
    else:
        _write_ranks(logits, ranks, num_experts, scoring)
    if bias != 0:
        target, addends = floats(ranks), floats(bias)
        for expert in range(num_experts):
            target[expert] += addends[expert]
    if num_groups > 1:
        _keep_best_groups(ranks, num_experts, num_groups, word(operands, 11), word(operands, 12))


@compiled
def _route_token(operands, logits, ranks, ids, weights, scoring):
    num_experts, top_k, divides_by_all = word(operands, 3), word(operands, 4), word(operands, 5)
    values, chosen_by, shares = floats(logits), floats(ranks), floats(weights)
    largest = _largest(logits, num_experts)
    last = _last_chosen(ranks, num_experts, top_k)
    last_rank = _rank(chosen_by[last])
    total = np.float32(0.0)
    if scoring != SOFTMAX:
        total = float_of_word(word(operands, 14))
    every, num_chosen = np.float32(0.0), np.int64(0)
    for expert in range(num_experts):
        logit = values[expert]
        share = _share(logit, largest, scoring)
        every += share
        is_chosen = _is_chosen_before(_rank(chosen_by[expert]), expert, last_rank, last + 1)
        if divides_by_all != 0 or is_chosen:
            total += share
        if logit != logit:
            total = logit
        if is_chosen:
            put_word(ids, num_chosen, expert)
            shares[num_chosen] = share
            num_chosen += 1
    if scoring == SOFTMAX and total < every * np.float32(_SMALLEST_SHARE):
        total = every * np.float32(_SMALLEST_SHARE)
    if scoring != SOFTMAX and divides_by_all != 0:
        total = np.float32(1.0) if total == total else total
    scale = float_of_word(word(operands, 13))
    for i in range(top_k):
        shares[i] = shares[i] / total * scale


@compiled
def _mixed_weight(logits, num_experts, expert, limit):
    """Returns the weight of an expert as SparseMixer has it."""
    values, total = floats(logits), np.float32(0.0)
    own = values[expert]
    for other in range(num_experts):
        logit = values[other]
        gap = (own - logit) / max(max(-logit, logit), own)
        if _is_chosen_before(_rank(own), expert, _rank(logit), other + 1):
            total += np.float32(0.0) if gap > limit else exp(logit - own)
    return np.float32(1.0) / total


@compiled
def _mix_token(operands, logits, ids, weights):
    """Chooses a token's experts, with the weights of MIXER."""
    num_experts, top_k = word(operands, 3), word(operands, 4)
    values, found = floats(logits), floats(weights)
    scale, limit = float_of_word(word(operands, 13)), float_of_word(word(operands, 14))
    last = _last_chosen(logits, num_experts, top_k)
    last_rank, num_chosen = _rank(values[last]), np.int64(0)
    for expert in range(num_experts):
        if values[expert] != values[expert]:
            scale = values[expert]
    for expert in range(num_experts):
        if _is_chosen_before(_rank(values[expert]), expert, last_rank, last + 1):
            put_word(ids, num_chosen, expert)
            found[num_chosen] = _mixed_weight(logits, num_experts, expert, limit) * scale
            num_chosen += 1


@compiled
def _route(operands, piece, thread, num_threads, scoring, ranked):
    logits, stride, num_experts = word(operands, 1), word(operands, 2), word(operands, 3)
    top_k, ids, weights = word(operands, 4), word(operands, 6), word(operands, 7)
    begin, end = tokens_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        own, ranks = logits + token * stride, logits + token * stride
        own_ids, own_weights = ids + token * top_k * 8, weights + token * top_k * 4
        if scoring == MIXER:
            _mix_token(operands, own, own_ids, own_weights)
        else:
            if word(operands, 8) != 0:
                ranks = word(operands, 8) + token * 4 * (num_experts + word(operands, 10))
                _rank_experts(operands, own, ranks, ranked)
            _route_token(operands, own, ranks, own_ids, own_weights, scoring)


ROUTE = {
    ranked: Kernel(pieces_of_tokens, _route, scoring, ranked)
    for scoring, ranked in (
        *((scoring, scoring) for scoring in (SOFTMAX, SIGMOID, SQRT_SOFTPLUS, MIXER)),
        (SIGMOID, SIGMOID_OF_TOP),
    )
}
"""Kernels by the scores of experts; each chooses a token's experts. `reference.moe.route` defines
them.

SOFTMAX: ``weight = exp(logit) / sum(exp(logits))``, where the sum is over all experts or over the
chosen ones. The latter is both the softmax of the chosen logits, and the softmax of all logits
divided by the sum over the chosen ones; that counts as at least 1e-12. SIGMOID: ``weight =
sigmoid(logit)``, or this divided by the sum over the chosen ones; SIGMOID_OF_TOP has the same
weights, SQRT_SOFTPLUS those of ``sqrt(softplus(logit))``. MIXER: see `mixer_limit` of
`reference.moe.Choice`; operands 5 and 8 to 12 are not used.

A NaN is chosen last; all weights of its token are NaN then, as they are if the largest logit is
infinite and the scores are SOFTMAX.

Operands (addresses; strides in bytes):

    0  the address of the number of tokens
    1  logits [tokens, experts] float32, 2  their stride (a number)
    3  the number of experts, 4  top_k, at most that number (numbers)
    5  1: the sum is over all experts, or there is none but for SOFTMAX; 0: over the chosen (a
       number)
    6  ids [tokens, top_k] int64, in ascending order, 7  weights [tokens, top_k] float32
    8  scratch [tokens, experts + groups] float32, or 0: logits rank the experts, and operands 9 to
       12 are not used
    9  bias [experts] float32, added to the scores, or of SIGMOID_OF_TOP the logits, that rank the
       experts, or 0
    10 groups, of consecutive experts; 1: there are none (a number)
    11 the number of groups that a token's experts are chosen from, and 12 how many of a group's
       largest ranks make the group's score: 1 or 2 (numbers)
    13 the factor of the weights, a number from `word_of_float`
    14 what is added to the sum over the chosen ones but for SOFTMAX, or the limit of MIXER,
       likewise
"""


@compiled
def _find_chosen(row, top_k, num_experts, ids):
    """Writes the experts of a row of a table in ascending order. Numbers of no expert, which only a
    damaged file has, count as the nearest one."""
    values = floats(row)
    for choice in range(top_k):
        value = values[choice] if values[choice] == values[choice] else np.float32(0.0)
        bounded = max(min(value, np.float32(num_experts - 1)), np.float32(0.0))
        expert, place = np.int64(np.int32(bounded)), choice
        while place > 0 and word(ids, place - 1) > expert:
            put_word(ids, place, word(ids, place - 1))
            place -= 1
        put_word(ids, place, expert)


@compiled
def _route_by_token(operands, piece, thread, num_threads, scoring):
    logits, stride, num_experts = word(operands, 1), word(operands, 2), word(operands, 3)
    top_k, ids, weights = word(operands, 4), word(operands, 5), word(operands, 6)
    begin, end = tokens_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        values, shares = floats(logits + token * stride), floats(weights + token * top_k * 4)
        own = ids + token * top_k * 8
        row = max(word(word(operands, 7), token), 0)
        _find_chosen(word(operands, 8) + row * top_k * 4, top_k, num_experts, own)
        total = float_of_word(word(operands, 10))
        for choice in range(top_k):
            share = _share(values[word(own, choice)], np.float32(0.0), scoring)
            shares[choice] = share
            total += share
        scale = float_of_word(word(operands, 9))
        for choice in range(top_k):
            shares[choice] = shares[choice] / total * scale


ROUTE_BY_TOKEN = {
    scoring: Kernel(pieces_of_tokens, _route_by_token, scoring)
    for scoring in (SIGMOID, SQRT_SOFTPLUS)
}
"""Kernels by the scores of experts. The id of a token chooses its experts; their scores are divided
by the sum of these.

Operands (addresses; strides in bytes): address of the number of tokens; logits [tokens, experts]
float32 and their stride; the number of experts; top_k; ids [tokens, top_k] int64, in ascending
order; weights [tokens, top_k] float32; token ids, int64 [tokens], of which negative ones count as
0; the experts of each id, [vocabulary, top_k] float32; the factor of the weights, a number from
`word_of_float`; what is added to a sum, likewise.
"""
