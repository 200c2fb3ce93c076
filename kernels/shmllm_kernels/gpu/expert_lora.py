"""Low-rank adapters of experts on a GPU: what they add to the products of `experts`.

A block of sorted pairs belongs to one expert, but its tokens may have different adapters. A program
multiplies the rows of each of them in turn, with the other rows masked. The grids are those of
`experts`, so a captured graph stays valid when the adapters of a step change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.lora import BLOCK_K, BLOCK_RANKS, StepUnits
from shmllm_kernels.gpu.pairs import SortedPairs, block_of, max_blocks
from shmllm_kernels.gpu.products import multiply

RANKS_AT_ONCE = tl.constexpr(BLOCK_RANKS)


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The adapters' matrices for the same product of every expert.

    Attributes:
        a: [places, experts, ranks, k]; see `lora.LoraPlaces`.
        b: [places, experts, columns, ranks].
        scales: [places, experts, ranks] float32.
        is_used: [places, experts] int32.

    Each expert's matrices are contiguous, with any stride between places and experts; is_used has
    any stride between places.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    is_used: Tensor


@dataclass(frozen=True, slots=True)
class PairAdapters:
    """What a product of experts adds.

    Attributes:
        t: [pairs or more, ranks or more], what `shrink_pairs` wrote, by sorted pair.
        places: the adapters' matrices.
        step: the tokens that have one.
        top_k: the number of experts of each token.
    """

    t: Tensor
    places: ExpertPlaces
    step: StepUnits
    top_k: int


class PairOperands(NamedTuple):
    """What `add_to_block` reads: pointers and strides of `PairAdapters`, and the ranks."""

    t: Any
    b: Any
    is_used: Any
    num_units: Any
    places: Any
    t_stride: Any
    b_stride: Any
    b_expert_stride: Any
    is_used_stride: Any
    num_ranks: Any
    top_k: Any


def operands_of(adapters: PairAdapters | None, dtype: Any) -> PairOperands | None:
    """Returns the operands of a kernel that calls `add_to_block`; None: there are no adapters."""
    if adapters is None:
        return None
    t, places, step = adapters.t, adapters.places, adapters.step
    assert t.dtype is places.b.dtype is dtype, "one dtype"
    assert t.stride(1) == 1, "rows must be contiguous"
    assert places.b[0, 0].is_contiguous(), "an expert's b must be contiguous"
    return PairOperands(
        t, places.b, places.is_used, step.num_units, step.places, t.stride(0), places.b.stride(0),
        places.b.stride(1), places.is_used.stride(0), places.b.shape[3], adapters.top_k,
    )  # fmt: skip


@triton.jit
def _places_of(num_units_ptr, places_ptr, tokens, is_row):
    """Returns the place of each row's adapter; -1: it has none."""
    is_there = is_row & (tl.load(num_units_ptr) > 0)
    return tl.load(places_ptr + tokens, mask=is_there, other=-1)


@triton.jit
def add_to_block(
    total,
    adapters,
    expert,
    pairs,
    rows,
    is_row,
    columns,
    is_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns the products of a block, [BLOCK_M, BLOCK_N] float32, with what adapters add.

    Args:
        total: the products.
        adapters: the `PairOperands`.
        expert: int64.
        pairs, rows, is_row: [BLOCK_M], the pairs of the block, their sorted places, and which of
            these there are.
        columns, is_column: [BLOCK_N], the columns of the product.
    """
    left = _places_of(adapters.num_units, adapters.places, pairs // adapters.top_k, is_row)
    place = tl.max(left, 0)
    while place >= 0:
        is_own = left == place
        wide = place.to(tl.int64)
        if tl.load(adapters.is_used + wide * adapters.is_used_stride + expert) != 0:
            b = adapters.b + wide * adapters.b_stride + expert * adapters.b_expert_stride
            t_rows = adapters.t + rows.to(tl.int64) * adapters.t_stride
            total += multiply(
                t_rows, is_own, b, b, columns.to(tl.int64), is_column, adapters.num_ranks,
                adapters.num_ranks, 0, None, False, BLOCK_M, BLOCK_N, RANKS_AT_ONCE,
            )  # fmt: skip
        left = tl.where(is_own, -1, left)
        place = tl.max(left, 0)
    return total


@triton.jit
def _shrink_pairs(
    t_ptr, x_ptr, a_ptr, scales_ptr, is_used_ptr, num_units_ptr, places_ptr, pairs_ptr, blocks_ptr,
    num_blocks_ptr, num_ranks, k, t_stride, x_stride, a_stride, a_expert_stride, scales_stride,
    scales_expert_stride, is_used_stride, TOP_K: tl.constexpr, BY_TOKEN: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    num_blocks = tl.load(num_blocks_ptr)
    expert, pairs, rows, is_row = block_of(index, blocks_ptr, pairs_ptr, BLOCK_M)
    if index >= num_blocks:
        return
    tokens = pairs // TOP_K
    ranks = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_rank = ranks < num_ranks
    source = tokens if BY_TOKEN else rows
    x_rows = x_ptr + source.to(tl.int64) * x_stride
    targets = t_ptr + rows.to(tl.int64)[:, None] * t_stride + ranks[None, :]
    left = _places_of(num_units_ptr, places_ptr, tokens, is_row)
    place = tl.max(left, 0)
    while place >= 0:
        is_own = left == place
        wide = place.to(tl.int64)
        if tl.load(is_used_ptr + wide * is_used_stride + expert) != 0:
            a = a_ptr + wide * a_stride + expert * a_expert_stride
            result = multiply(
                x_rows, is_own, a, a, ranks, is_rank, k, k, 0, None, EVEN_K, BLOCK_M, BLOCK_N,
                BLOCK_K,
            )  # fmt: skip
            scales = scales_ptr + wide * scales_stride + expert * scales_expert_stride + ranks
            value = result * tl.load(scales, mask=is_rank, other=0.0)[None, :]
            mask = is_own[:, None] & is_rank[None, :]
            tl.store(targets, value.to(t_ptr.dtype.element_ty), mask=mask)
        left = tl.where(is_own, -1, left)
        place = tl.max(left, 0)


def shrink_pairs(
    adapters: PairAdapters, x: Tensor, pairs: SortedPairs, block_m: int, by_token: bool
) -> None:
    """Writes ``scale * (x @ A.T)`` for each pair whose token has an adapter.

    Sums are float32; the result is rounded once.

    Args:
        adapters: what is read, and ``t``, which is written, in x's dtype.
        x: [tokens, k], or [pairs, k] in the order of the sorted pairs, each row contiguous.
        pairs: the sorted pairs, in blocks of ``block_m``.
        block_m: the largest number of pairs in a block.
        by_token: whether x has a row for each token.

    One launch before each of `experts.gate_and_up` and `experts.down`, which add the products with
    B. It reads A of the experts and adapters of each block of pairs once: with a rank of 16 and 128
    experts of 2,048 in bfloat16, 8.4 MB for an adapter whose tokens choose all experts, 4 us; for
    one token with 8 experts, 0.5 MB, 2 us, the launch.
    """
    places, t, step = adapters.places, adapters.t, adapters.step
    _, num_experts, num_ranks, k = places.a.shape
    num_pairs = len(x) * adapters.top_k if by_token else len(x)
    assert x.shape[1] == k, "a: rows of k"
    assert x.dtype is t.dtype is places.a.dtype, "one dtype"
    assert x.stride(1) == t.stride(1) == 1, "rows must be contiguous"
    assert len(t) >= num_pairs, "memory for each pair"
    assert places.a[0, 0].is_contiguous(), "an expert's a must be contiguous"
    assert places.scales.stride(2) == places.is_used.stride(1) == 1, "rows must be contiguous"
    if num_pairs == 0:
        return
    grid = max_blocks(num_pairs, num_experts, block_m), triton.cdiv(num_ranks, BLOCK_RANKS)
    _shrink_pairs[grid](
        t, x, places.a, places.scales, places.is_used, step.num_units, step.places, pairs.pairs,
        pairs.blocks, pairs.num_blocks, num_ranks, k, t.stride(0), x.stride(0),
        *places.a.stride()[:2], *places.scales.stride()[:2], places.is_used.stride(0),
        TOP_K=adapters.top_k, BY_TOKEN=by_token, EVEN_K=k % BLOCK_K == 0, BLOCK_M=block_m,
        BLOCK_N=BLOCK_RANKS, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
