"""Sorts the pairs of a step by their experts.

A pair is a token and one of its ``top_k`` experts; pair ``token * top_k + choice``. `sort_pairs`
lays the pairs out expert by expert, in blocks, each of which a program of `experts` computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two

BLOCK_WORDS = tl.constexpr(3)
PAIRS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs, sorted by their experts, and those of one expert by their tokens.

    Attributes:
        pairs: [pairs] int32, the pairs in that order.
        counts: [experts] int32, the number of pairs of each expert.
        blocks: [blocks, 3] int32: the expert, the first place in ``pairs``, and the number of
            pairs, at most ``block_m``.
        num_blocks: [1] int32, the number of blocks.
    """

    pairs: Tensor
    counts: Tensor
    blocks: Tensor
    num_blocks: Tensor


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Returns the largest number of blocks that `sort_pairs` makes."""
    return min(num_experts, num_pairs) + num_pairs // block_m


@triton.jit
def block_of(index, blocks_ptr, BLOCK_M: tl.constexpr):
    """Returns the expert of a block, the places of its pairs, and which of these there are."""
    block = blocks_ptr + index * BLOCK_WORDS
    rows = tl.arange(0, BLOCK_M)
    return tl.load(block).to(tl.int64), tl.load(block + 1) + rows, rows < tl.load(block + 2)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(counts_ptr, ids_ptr, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs(
    pairs_ptr,
    blocks_ptr,
    num_blocks_ptr,
    counts_ptr,
    ids_ptr,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, counts, 0), axis=0)
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    count = tl.sum(tl.where(experts == expert, counts, 0), axis=0)
    for index in range(0, tl.cdiv(count, BLOCK_M)):
        block = blocks_ptr + (first_block + index) * BLOCK_WORDS
        tl.store(block, expert)
        tl.store(block + 1, first + index * BLOCK_M)
        tl.store(block + 2, tl.minimum(count - index * BLOCK_M, BLOCK_M))
    if expert == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        is_mine = (ids == expert).to(tl.int32)
        places = first + tl.cumsum(is_mine, axis=0) - 1
        tl.store(pairs_ptr + places, pairs, mask=is_mine != 0)
        first += tl.sum(is_mine, axis=0)


def sort_pairs(out: SortedPairs, ids: Tensor, block_m: int) -> None:
    """Sorts pairs by their experts.

    Args:
        out: what is written, contiguous; blocks for at least `max_blocks` of these pairs.
        ids: [tokens, top_k] int32, contiguous, the expert of each pair; those of -1 are left out.
        block_m: the largest number of pairs in a block.

    Two launches a layer. A program for each expert reads all ids, from the L2 cache: 2 us each for
    one token, 15 us each for 8,192 tokens with 8 of 128 experts, which are 33 MB.
    """
    num_pairs, num_experts = ids.numel(), len(out.counts)
    assert ids.dtype is torch.int32, "ids are int32"
    assert ids.is_contiguous(), "ids must be contiguous"
    assert len(out.pairs) >= num_pairs, "too few places for the pairs"
    assert len(out.blocks) >= max_blocks(num_pairs, num_experts, block_m), "too few blocks"
    if num_pairs == 0:
        out.num_blocks.zero_()
        return
    block = min(next_power_of_two(num_pairs), PAIRS_AT_ONCE)
    _count_pairs[(num_experts,)](out.counts, ids, num_pairs, BLOCK=block)
    _place_pairs[(num_experts,)](
        out.pairs,
        out.blocks,
        out.num_blocks,
        out.counts,
        ids,
        num_pairs,
        NUM_EXPERTS=num_experts,
        PADDED=next_power_of_two(num_experts),
        BLOCK_M=block_m,
        BLOCK=block,
    )
