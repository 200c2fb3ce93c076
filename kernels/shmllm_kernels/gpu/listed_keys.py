"""The kernel that lists what each token attends to in a compressed attention: the keys of its
window, and entries that stand for several tokens, all or those that an indexer chooses.

Keys and entries lie in different blocks. A list has the distances of both from the beginning of the
cache, in units that all of them are multiples of, in 32 bits: `latent_attention` reads them as
slots of a cache with so many elements in a block.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.choices import chosen_places, entry_place, least_chosen, place_of
from shmllm_kernels.gpu.indexer import RequestTables, score_keys

SIZE = 1024
"""The number of keys, or of scores, that a program lists at a time."""


class Pages(NamedTuple):
    """Where the rows of a layer lie, in units.

    Attributes:
        first: that of the first one, from the beginning of the cache.
        block_stride: from one block to the next.
        stride: from one row of a block to the next.
    """

    first: int
    block_stride: int
    stride: int

    def over(self, unit: int) -> Pages:
        """Returns the same in larger units."""
        return Pages(*(number // unit for number in self))


class Scored(NamedTuple):
    """What an indexer chooses entries by.

    Attributes:
        query: [tokens, num_heads, dim], heads contiguous, not rotated.
        weights: [tokens, num_heads], heads contiguous.
        keys: [blocks, rows, dim], rows contiguous: those of entries.
        cos, sin: [tokens, rope_dim], by which the last elements of queries rotate.
    """

    query: Tensor
    weights: Tensor
    keys: Tensor
    cos: Tensor
    sin: Tensor


class Entries(NamedTuple):
    """The entries of a layer.

    Attributes:
        pages: where they are.
        block_table: [requests, blocks] int32, rows contiguous, their blocks.
        rate: the number of tokens of one.
        most: the largest number that a token attends to. If there may be more, ``scored`` chooses.
        scored: what chooses them; None: there are no more.
    """

    pages: Pages
    block_table: Tensor
    rate: int
    most: int
    scored: Scored | None = None


@triton.jit(do_not_specialize=["num_requests", "first_token"])
def _list_keys(
    listed_ptr, new_starts_ptr, lens_ptr, scores_ptr, table_ptr, entry_table_ptr, starts_ptr,
    contexts_ptr, num_requests, first_token, listed_stride, scores_stride, table_stride,
    entry_table_stride, keys, entries,
    WINDOW: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = row + first_token
    request, count = place_of(token, starts_ptr, contexts_ptr, num_requests)
    request = request.to(tl.int64)
    listed_ptr += token.to(tl.int64) * listed_stride
    num_keys = tl.maximum(tl.minimum(count, WINDOW), 0)
    for begin in range(0, num_keys, SIZE):
        places = begin + tl.arange(0, SIZE)
        present, positions = places < num_keys, count - num_keys + places
        blocks = tl.load(
            table_ptr + request * table_stride + positions // BLOCK_SIZE, mask=present, other=0
        )
        found = blocks.to(tl.int64) * keys.block_stride + positions % BLOCK_SIZE * keys.stride
        tl.store(listed_ptr + places, (keys.first + found).to(tl.int32), mask=present)
    num_entries = num_keys * 0
    if RATE:
        num_entries = tl.maximum(count, 0) // RATE
    tl.store(lens_ptr + token, num_keys + tl.minimum(num_entries, TOP_K))
    num_tokens = tl.load(starts_ptr + num_requests)
    tl.store(new_starts_ptr + token + 1, tl.minimum(token + 1, num_tokens))
    if token == 0:
        tl.store(new_starts_ptr, token)
    if RATE:
        scores_ptr += row.to(tl.int64) * scores_stride
        entry_table_ptr += request * entry_table_stride
        last, left = least_chosen(scores_ptr, num_entries, TOP_K, SIZE)
        none = num_keys * 0
        chosen, tied = none, none
        for begin in range(0, num_entries, SIZE):
            numbers = begin + tl.arange(0, SIZE)
            is_chosen, places, chosen, tied = chosen_places(
                scores_ptr, numbers, num_entries, last, left, chosen, tied, TOP_K
            )
            index, at = entry_place(numbers, RATE, BLOCK_SIZE)
            blocks = tl.load(entry_table_ptr + index, mask=is_chosen, other=0)
            found = blocks.to(tl.int64) * entries.block_stride + at * entries.stride
            target = listed_ptr + num_keys + places
            tl.store(target, (entries.first + found).to(tl.int32), mask=is_chosen)


def unit_of(*pages: Pages) -> int:
    """Returns the largest unit of which all distances are multiples."""
    return gcd(*(number for each in pages for number in each))


def list_keys(
    listed: Tensor,
    starts: Tensor,
    lens: Tensor,
    scores: Tensor,
    of_requests: RequestTables,
    keys: Pages,
    window: int,
    block_size: int,
    entries: Entries | None = None,
) -> None:
    """Computes ``reference.compression.list_keys`` for each token of a step.

    Args:
        listed: [tokens, columns] int32, rows contiguous; gets the places of what tokens attend to.
        starts: [tokens + 1] int32; gets 0, 1 and so on, up to the number of tokens of requests:
            each becomes a request of its own.
        lens: [tokens] int32; gets how much each attends to, 0 for tokens of no request.
        scores: [rows, entries] float32, scratch memory, for the longest context.
        of_requests: the tables of requests, with the blocks of keys.
        keys: where keys are, in the units of places.
        window: how many positions a token attends to at most, its own included.
        block_size: the number of tokens of a block.
        entries: the entries; None: there are none.

    One launch a layer, and with an indexer two for each TOKENS_AT_ONCE tokens. It writes 4 bytes
    for each key: 2.6 KB of 128 keys and 512 entries; 35 KB of a million tokens in entries of 128,
    which one program lists in 10 us. Scores cost what they cost in `indexer.choose_tokens`, of a
    fourth of the keys with entries of 4 tokens.
    """
    tokens, requests = len(lens), len(of_requests.context_lens)
    table = of_requests.block_table
    pages, others, rate, top_k, scored = entries or Entries(keys, table, 0, 0)
    assert len(listed) == tokens == len(starts) - 1, "a list for each token"
    assert listed.dtype is starts.dtype is lens.dtype is torch.int32, "places are int32"
    assert listed.stride(1) == 1, "rows must be contiguous"
    assert listed.shape[1] >= window + top_k, "a list is too short"
    assert scores.dtype is torch.float32, "scores are float32"
    if tokens == 0:
        return
    assert requests, "tokens have requests, or are padding beside them"
    at_once = tokens if scored is None else len(scores)
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        if scored is not None:
            query, weights, own_keys, cos, sin = scored
            score_keys(
                scores, query, weights, own_keys, cos, sin,
                of_requests._replace(block_table=others), first, count, top_k, True, block_size,
                rate, query.shape[2] - cos.shape[1],
            )  # fmt: skip
        _list_keys[(count,)](
            listed, starts, lens, scores, table, others, *of_requests[1:], requests, first,
            listed.stride(0), 0 if scored is None else scores.stride(0), table.stride(0),
            others.stride(0), keys, pages, WINDOW=window, RATE=rate, TOP_K=top_k,
            BLOCK_SIZE=block_size, SIZE=SIZE, num_warps=8,
        )  # fmt: skip
