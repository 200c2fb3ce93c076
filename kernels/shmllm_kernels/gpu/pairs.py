"""Sorts the pairs of a step by their experts.

A pair is a token and one of its ``top_k`` experts; pair ``token * top_k + choice``. Pairs of one
expert lie in blocks, each of which a program of `experts` computes. `pair_layout` makes the same
blocks of a step of few tokens, within the launch of `routing.route`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two

BLOCK_WORDS = tl.constexpr(3)
PAIRS_AT_ONCE = 2048

Integers = Callable[..., Tensor]
"""Allocates int32 of a shape."""


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs in blocks, in ascending order of their experts, and those of one expert in ascending
    order of their tokens. Each block but the last one of an expert is full.

    Attributes:
        pairs: [blocks * block_m] int32, the pairs of each block; behind them, up to the next
            block, nothing that counts.
        blocks: [blocks, 3] int32: the expert, the number of pairs in the blocks before, and the
            number of pairs, at most ``block_m``.
        num_blocks: [1] int32, the number of blocks.
    """

    pairs: Tensor
    blocks: Tensor
    num_blocks: Tensor

    @classmethod
    def allocate(
        cls, num_pairs: int, num_experts: int, smallest: int, largest: int, integers: Integers
    ) -> SortedPairs:
        """Returns memory for so many pairs or fewer, in blocks of any of these sizes."""
        blocks = max_blocks(num_pairs, num_experts, smallest)
        places = max_blocks(num_pairs, num_experts, largest) * largest
        return cls(integers(places), integers(blocks, 3), integers(1))


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Returns the largest number of blocks of these pairs: each expert that has pairs begins one,
    and every further ``block_m`` of the other pairs make one more."""
    chosen = min(num_experts, num_pairs)
    return chosen + (num_pairs - chosen) // block_m


@triton.jit
def block_of(index, blocks_ptr, pairs_ptr, BLOCK_M: tl.constexpr):
    """Returns the expert of a block, int64; and [BLOCK_M] its pairs, their places in the order of
    all pairs, and which of these there are.

    Nothing here depends on what an earlier load returned, so that all loads, and that of the number
    of blocks, take the time of one. Blocks that do not exist have garbage.
    """
    block = blocks_ptr + index * BLOCK_WORDS
    rows = tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + index * BLOCK_M + rows)
    expert, first = tl.load(block).to(tl.int64), tl.load(block + 1)
    is_row = rows < tl.load(block + 2)
    return expert, tl.where(is_row, pairs, 0), first + rows, is_row


@triton.jit
def store_blocks(blocks_ptr, experts, counts, first, first_block, block_m, is_own):
    """Writes the blocks of some experts; see `SortedPairs.blocks`.

    Args:
        experts: [N], the experts.
        counts: [N], the number of pairs of each.
        first: [N], the number of pairs of the experts before.
        first_block: [N], their number of blocks.
        block_m: the largest number of pairs in a block.
        is_own: [N], whose blocks are written.
    """
    left = tl.where(is_own, counts, 0)
    for index in range(0, tl.cdiv(tl.max(left, axis=0), block_m)):
        block = blocks_ptr + (first_block + index) * BLOCK_WORDS
        begin = index * block_m
        tl.store(block, experts, mask=begin < left)
        tl.store(block + 1, first + begin, mask=begin < left)
        tl.store(block + 2, tl.minimum(left - begin, block_m), mask=begin < left)


@triton.jit(do_not_specialize=["num_pairs", "block_m"])
def _sort_pairs(
    pairs_ptr,
    blocks_ptr,
    num_blocks_ptr,
    ids_ptr,
    num_pairs,
    block_m,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert, experts = tl.program_id(0), tl.arange(0, PADDED)
    counts = tl.zeros((PADDED,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(ids, 0), PADDED, mask=ids >= 0)
    blocks = (counts + block_m - 1) // block_m
    first = tl.cumsum(counts, axis=0) - counts
    first_block = tl.cumsum(blocks, axis=0) - blocks
    is_own = experts == expert
    store_blocks(blocks_ptr, experts, counts, first, first_block, block_m, is_own)
    if expert == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    first_place = tl.sum(tl.where(is_own, first_block, 0), axis=0) * block_m
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        is_mine = (ids == expert).to(tl.int32)
        places = first_place + tl.cumsum(is_mine, axis=0) - 1
        tl.store(pairs_ptr + places, pairs, mask=is_mine != 0)
        first_place += tl.sum(is_mine, axis=0)


def sort_pairs(out: SortedPairs, ids: Tensor, num_experts: int, block_m: int) -> None:
    """Lays pairs out by their experts.

    Args:
        out: what is written, contiguous, with room for at least `max_blocks` of these pairs.
        ids: [tokens, top_k] int32, contiguous, the expert of each pair; those of -1 are left out.
        num_experts: the number of experts.
        block_m: the largest number of pairs in a block.

    One launch a layer. A program for each expert reads all ids twice, from the L2 cache, first to
    count those of all experts and then to place its own: 3 us for 513 tokens with 8 of 128 experts,
    and 20 us for 8,192, of which the L2 cache takes 12 for 66 MB, and shared memory 4 to count
    65,536 ids.
    """
    num_pairs = ids.numel()
    assert ids.dtype is torch.int32, "ids are int32"
    assert ids.is_contiguous(), "ids must be contiguous"
    check_room(out, num_pairs, num_experts, block_m)
    if num_pairs == 0:
        out.num_blocks.zero_()
        return
    _sort_pairs[(num_experts,)](
        out.pairs,
        out.blocks,
        out.num_blocks,
        ids,
        num_pairs,
        block_m,
        PADDED=next_power_of_two(num_experts),
        BLOCK=PAIRS_AT_ONCE,
        num_warps=8,
    )


def check_room(out: SortedPairs, num_pairs: int, num_experts: int, block_m: int) -> None:
    """Asserts that there is room for these pairs."""
    blocks = max_blocks(num_pairs, num_experts, block_m)
    assert len(out.blocks) >= blocks, "too few blocks"
    assert len(out.pairs) >= blocks * block_m, "too few places for the pairs"
