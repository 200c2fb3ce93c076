"""Lays out the pairs of a step of few tokens by their experts, within the launch that chooses them.

Each program of `routing.route` has a chunk of tokens. It counts their pairs, and the program that
finishes last adds the counts of all chunks and writes what `pairs.sort_pairs` would write. Nothing
depends on which program is the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.pairs import Integers, SortedPairs, store_blocks

MOST_TOKENS = 512
MOST_COUNTS = 8192


@dataclass(frozen=True, slots=True)
class LayoutScratch:
    """What the programs of a routing leave for the last one.

    Attributes:
        counts: [chunks of tokens, experts] int32, the pairs of each chunk; see `num_chunks`.
        ranks: [pairs] int32, the number of earlier pairs of the same chunk and expert.
        num_done: [1] int32, the number of programs that have finished. It is 0 before and after
            each launch.
    """

    counts: Tensor
    ranks: Tensor
    num_done: Tensor

    @classmethod
    def allocate(cls, num_experts: int, top_k: int, integers: Integers) -> LayoutScratch:
        """Returns memory for all steps that `lays_out`; ``integers`` must set it to 0."""
        most = most_tokens(num_experts)
        chunks = num_chunks(most, num_experts)
        return cls(integers(chunks, num_experts), integers(most * top_k), integers(1))


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Where `routing.route` lays pairs out.

    Attributes:
        pairs: what is written.
        scratch: what is used for that.
        block_m: the largest number of pairs in a block.
    """

    pairs: SortedPairs
    scratch: LayoutScratch
    block_m: int


class LayoutOperands(NamedTuple):
    """The memory of a `PairLayout`, as kernels take it."""

    pairs: Any
    blocks: Any
    num_blocks: Any
    counts: Any
    ranks: Any
    num_done: Any


def operands_of(layout: PairLayout | None) -> LayoutOperands | None:
    """Returns the operands of a kernel that calls `lay_out`; None: it does not."""
    if layout is None:
        return None
    pairs, scratch = layout.pairs, layout.scratch
    return LayoutOperands(
        pairs.pairs, pairs.blocks, pairs.num_blocks, scratch.counts, scratch.ranks, scratch.num_done
    )


def tokens_at_once(num_experts: int) -> int:
    """Returns the number of tokens in a chunk, which a program of `routing.route` chooses for: 16,
    and of more than 512 experts as many as registers have room for."""
    return max(min(MOST_COUNTS // next_power_of_two(num_experts), 16), 1)


def num_chunks(num_tokens: int, num_experts: int) -> int:
    """Returns the number of chunks of so many tokens."""
    return -(-num_tokens // tokens_at_once(num_experts))


def most_tokens(num_experts: int) -> int:
    """Returns the largest number of tokens whose pairs `routing.route` lays out.

    Up to 16 tokens one program does it without a word from memory, in 0.3 us. Of more tokens each
    program writes its counts and adds to a counter, 1.2 us with the counter's answer. The last one
    reads counts, ids and ranks in 0.6 us, and where the chunks begin in another 0.6 us. An
    instruction of its 8 warps takes 2 cycles; it has about 20 for 256 counts, of which 128 experts
    have 4,096, and 30 for 256 of 4,096 pairs: 1,600 cycles, 0.9 us. That is 3.3 us. A launch that
    sorts takes 0.8 us to begin, 0.6 us for the ids, and 1 us or more to count, to read them again
    and to write: 2.5 us for 17 tokens and 3 us for 512. So there is nothing to win beyond the
    largest steps of decodes, 512 tokens. 8,192 counts are 32 of each thread, which fit in
    registers.
    """
    chunks = MOST_COUNTS // next_power_of_two(num_experts)
    return max(min(chunks * tokens_at_once(num_experts), MOST_TOKENS), 1)


def lays_out(num_tokens: int, num_experts: int) -> bool:
    """Returns whether `routing.route` lays out the pairs of a step; of another `sort_pairs` must.
    ``num_tokens`` includes padding, so that a captured graph and a launch do the same."""
    return num_tokens <= most_tokens(num_experts)


@triton.jit
def _place_experts(operands, counts, experts, block_m):
    """Writes all blocks, and returns where the pairs of each expert begin, [PADDED].

    Args:
        operands: the `LayoutOperands`.
        counts: [PADDED], the number of pairs of each expert.
        experts: [PADDED], the experts.
        block_m: the largest number of pairs in a block.
    """
    blocks = (counts + block_m - 1) // block_m
    first_block = tl.cumsum(blocks, axis=0) - blocks
    first = tl.cumsum(counts, axis=0) - counts
    store_blocks(operands.blocks, experts, counts, first, first_block, block_m, counts > 0)
    tl.store(operands.num_blocks, tl.sum(blocks, axis=0))
    return first_block * block_m


@triton.jit
def _lay_out(
    operands,
    ids_ptr,
    num_chunks,
    num_pairs,
    block_m,
    PAIRS_OF_CHUNK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Lays out all pairs, in one program, when all counts, ranks and ids are written."""
    chunks, experts, pairs = tl.arange(0, CHUNKS), tl.arange(0, PADDED), tl.arange(0, PAIRS)
    places = operands.counts + chunks[:, None] * NUM_EXPERTS + experts[None, :]
    is_there = (chunks < num_chunks)[:, None] & (experts < NUM_EXPERTS)[None, :]
    counts = tl.load(places, mask=is_there, other=0)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    ranks = tl.load(operands.ranks + pairs, mask=pairs < num_pairs, other=0)
    begins = _place_experts(operands, tl.sum(counts, axis=0), experts, block_m)
    tl.store(places, begins[None, :] + tl.cumsum(counts, axis=0) - counts, mask=is_there)
    tl.debug_barrier()  # a thread reads where a chunk begins, which another one has written
    own = operands.counts + pairs // PAIRS_OF_CHUNK * NUM_EXPERTS + ids
    place = tl.load(own, mask=ids >= 0, other=0) + ranks
    tl.store(operands.pairs + place, pairs, mask=ids >= 0)


@triton.jit
def lay_out_alone(operands, places, is_pair, block_m, PADDED: tl.constexpr):
    """Lays out the pairs of a program that has all tokens; arguments as of `count_and_lay_out`."""
    own = is_pair.to(tl.int32)
    begins = _place_experts(operands, tl.sum(own, axis=0), tl.arange(0, PADDED), block_m)
    ranks = tl.cumsum(own, axis=0) - 1
    tl.store(operands.pairs + begins[None, :] + ranks, places.to(tl.int32), mask=is_pair)


@triton.jit
def count_and_lay_out(
    operands,
    ids_ptr,
    places,
    is_pair,
    num_chunks,
    num_pairs,
    block_m,
    PAIRS_OF_CHUNK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Counts the pairs of this program's tokens. The last program lays out those of all programs; a
    program that is alone has them in registers.

    Args:
        operands: the `LayoutOperands`.
        ids_ptr: [pairs], the expert of each pair; -1: the pair is left out. This program has
            written those of its tokens.
        places: [tokens, PADDED], the pair of each token and expert.
        is_pair: [tokens, PADDED], which of these there are.
        num_chunks: the number of programs, at most CHUNKS; 0: nothing is laid out.
        num_pairs: the number of pairs, at most PAIRS.
        block_m: the largest number of pairs in a block.
    """
    if num_chunks > 0:
        if num_chunks == 1:
            lay_out_alone(operands, places, is_pair, block_m, PADDED)
        else:
            own, experts = is_pair.to(tl.int32), tl.arange(0, PADDED)
            counts, ranks = tl.sum(own, axis=0), tl.cumsum(own, axis=0) - 1
            tl.store(operands.ranks + places, ranks, mask=is_pair)
            of_chunk = operands.counts + tl.program_id(0) * NUM_EXPERTS + experts
            tl.store(of_chunk, counts, mask=experts < NUM_EXPERTS)
            tl.debug_barrier()  # all that this program writes is written before it counts itself
            if tl.atomic_add(operands.num_done, 1, sem="acq_rel", scope="gpu") == num_chunks - 1:
                tl.store(operands.num_done, 0)
                _lay_out(
                    operands, ids_ptr, num_chunks, num_pairs, block_m,
                    PAIRS_OF_CHUNK, NUM_EXPERTS, PADDED, CHUNKS, PAIRS,
                )  # fmt: skip
