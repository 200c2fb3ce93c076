"""Leaves the tokens of one of two kinds out of a mixture of experts (ERNIE 4.5, 2025)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.row_copies import source_of


@triton.jit
def _leave_out(
    ids_ptr, weights_ptr, tokens_ptr, last_tokens_ptr, listed_ptr,
    ARE_LISTED: tl.constexpr, COUNT: tl.constexpr, PADDED_COUNT: tl.constexpr, TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    own = source_of(tokens_ptr, last_tokens_ptr, token, True, HAS_SAMPLED=True)
    places, choices = tl.arange(0, PADDED_COUNT), tl.arange(0, PADDED)
    listed = tl.load(listed_ptr + places, mask=places < COUNT, other=-1)
    is_listed = tl.max((listed == own).to(tl.int32), axis=0) | (own < 0).to(tl.int32)
    pairs = token * TOP_K + choices
    is_out = (choices < TOP_K) & (is_listed != ARE_LISTED)
    tl.store(ids_ptr + pairs, -1, mask=is_out)
    tl.store(weights_ptr + pairs, 0.0, mask=is_out)


def leave_out(
    ids: Tensor,
    weights: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    listed: Tensor,
    are_listed: bool,
) -> None:
    """Computes `reference.moe.leave_out` in place.

    Args:
        ids: [tokens, top_k] int32, contiguous; become -1 for tokens that are left out.
        weights: [tokens, top_k] float32, contiguous; become 0 for these.
        token_ids: [tokens], contiguous, as those of `row_copies.embed`.
        last_tokens: [rows] int64, the token that was last sampled for each row.
        listed: [count] int64, contiguous, the ids that tell the kinds apart.
        are_listed: whether the tokens with these ids stay, or the others.
    """
    tokens, top_k = ids.shape
    assert weights.shape == ids.shape, "ids and weights: one for each choice"
    assert token_ids.shape == (tokens,), "token_ids: one for each token"
    assert ids.dtype is torch.int32, "ids are int32"
    assert listed.dtype is last_tokens.dtype is torch.int64, "these are int64"
    for tensor in (ids, weights, token_ids, last_tokens, listed):
        assert tensor.is_contiguous(), "all must be contiguous"
    if tokens == 0:
        return
    _leave_out[(tokens,)](
        ids, weights, token_ids, last_tokens, listed, ARE_LISTED=int(are_listed),
        COUNT=len(listed), PADDED_COUNT=next_power_of_two(len(listed)), TOP_K=top_k,
        PADDED=next_power_of_two(top_k), num_warps=1,
    )  # fmt: skip
