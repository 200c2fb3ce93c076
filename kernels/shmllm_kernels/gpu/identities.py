"""Choices of a router that are no experts, but return what experts read (LongCat-Flash, 2025)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two, row_warps

COLUMNS_AT_ONCE = 1024


@triton.jit
def _take_identities(
    out_ptr, x_ptr, ids_ptr, weights_ptr, out_stride, x_stride, width, num_experts,
    TOP_K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, PADDED)
    inside = choices < TOP_K
    pairs = token * TOP_K + choices
    ids = tl.load(ids_ptr + pairs, mask=inside, other=0)
    weights = tl.load(weights_ptr + pairs, mask=inside, other=0.0)
    tl.debug_barrier()  # a thread may load what another one overwrites
    is_expert = ids < num_experts
    total = tl.sum(tl.where(is_expert, 0.0, weights), axis=0)
    last = tl.max(tl.where(is_expert, ids, 0), axis=0)
    tl.store(ids_ptr + pairs, tl.where(is_expert, ids, last), mask=inside)
    tl.store(weights_ptr + pairs, tl.where(is_expert, weights, 0.0), mask=inside)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        within = columns < width
        x = tl.load(x_ptr + token * x_stride + columns, mask=within, other=0.0).to(tl.float32)
        place = out_ptr + token * out_stride + columns
        tl.store(place, (total * x).to(out_ptr.dtype.element_ty), mask=within)


def take_identities(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, num_experts: int) -> None:
    """Computes ``out = total * x``, with the sum of the weights of each token's choices that are no
    experts. These weights become 0, and their ids that of the token's last expert, or 0.

    Args:
        out: [tokens, width], each row contiguous.
        x: as ``out``, and its dtype: what experts read.
        ids: [tokens, top_k] int32, contiguous; those from ``num_experts`` on are no experts.
        weights: [tokens, top_k] float32, contiguous.
        num_experts: the number of experts.
    """
    (tokens, width), top_k = x.shape, ids.shape[1]
    assert out.shape == x.shape, "out has the shape of x"
    assert out.dtype is x.dtype, "out has the dtype of x"
    assert out.stride(1) == x.stride(1) == 1, "rows must be contiguous"
    assert ids.is_contiguous(), "ids must be contiguous"
    assert weights.is_contiguous(), "weights must be contiguous"
    if tokens == 0:
        return
    block = min(next_power_of_two(width), COLUMNS_AT_ONCE)
    _take_identities[(tokens,)](
        out, x, ids, weights, out.stride(0), x.stride(0), width, num_experts,
        TOP_K=top_k, PADDED=next_power_of_two(top_k), BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip
