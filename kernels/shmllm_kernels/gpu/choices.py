"""Kernel functions of indexers: which scores of a token are among the largest.

They must not know what is scored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.threshold_search import key_of

_SMALLEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def place_of(token, starts_ptr, contexts_ptr, num_requests):
    """Returns the request of a token, and the number of tokens up to its own; 0: it has none."""
    low = token * 0
    high = low + num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts_ptr + middle) <= token
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    begin, end = tl.load(starts_ptr + low), tl.load(starts_ptr + low + 1)
    count = tl.load(contexts_ptr + low) - (end - begin) + token - begin + 1
    return low, tl.where(token < end, count, 0)


@triton.jit
def entry_place(entry, RATE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Returns which of a request's blocks an entry lies in that stands for RATE tokens, that of the
    last of them, and its row there, behind those of entries that end before."""
    index = ((entry + 1) * RATE - 1) // BLOCK_SIZE
    return index, entry - index * BLOCK_SIZE // RATE


@triton.jit
def least_chosen(scores_ptr, count, TOP_K: tl.constexpr, SIZE: tl.constexpr):
    """Finds which of the scores, which are more than TOP_K, are chosen, bit by bit.

    Returns:
        The key of the least one, and how many of those with this key are chosen. If all are
        chosen, since there are no more, the scores are not read.
    """
    none = count * 0
    last, left = none.to(tl.int64) + _SMALLEST_KEY, none + TOP_K
    if count > TOP_K:
        for bit in range(32):
            higher = last + ((none + 1).to(tl.int64) << (31 - bit))
            found = none
            for begin in range(0, count, SIZE):
                keys = begin + tl.arange(0, SIZE)
                scores = tl.load(scores_ptr + keys, mask=keys < count, other=float("-inf"))
                found += tl.sum(((key_of(scores) >= higher) & (keys < count)).to(tl.int32), axis=0)
            last = tl.where(found >= TOP_K, higher, last)
        for begin in range(0, count, SIZE):
            keys = begin + tl.arange(0, SIZE)
            scores = tl.load(scores_ptr + keys, mask=keys < count, other=float("-inf"))
            left -= tl.sum(((key_of(scores) > last) & (keys < count)).to(tl.int32), axis=0)
    return last, left


@triton.jit
def chosen_places(scores_ptr, keys, count, last, left, found, tied, TOP_K: tl.constexpr):
    """Returns which of some scores are chosen, the places of these among all, and the numbers of
    chosen and of tied ones up to the last of them.

    Args:
        scores_ptr: the scores of a row.
        keys: which scores.
        count: the number of scores.
        last, left: the results of `least_chosen`.
        found, tied: the numbers of chosen and of tied scores before these.
    """
    present = keys < count
    is_more, is_tied = present, present & (keys < 0)
    if count > TOP_K:
        ranks = key_of(tl.load(scores_ptr + keys, mask=present, other=float("-inf")))
        is_more, is_tied = present & (ranks > last), present & (ranks == last)
    ties = is_tied.to(tl.int32)
    is_chosen = is_more | (is_tied & (tied + tl.cumsum(ties, 0) <= left))
    wanted = is_chosen.to(tl.int32)
    places = found + tl.cumsum(wanted, 0) - 1
    return is_chosen, places, found + tl.sum(wanted, axis=0), tied + tl.sum(ties, axis=0)
