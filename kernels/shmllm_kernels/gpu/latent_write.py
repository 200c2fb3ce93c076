"""Normalises a step's latents, rotates their key parts, and writes both to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two, row_warps
from shmllm_kernels.gpu.float8 import as_stored
from shmllm_kernels.gpu.rope_write import stored


@triton.jit
def pairs_of(HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the places of the pairs of elements that are rotated together."""
    pairs = tl.arange(0, PAIRS)
    if IS_INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, HALF + pairs
    return first, second


@triton.jit
def rotated_pairs(
    source, cos_ptr, sin_ptr, first_place, second_place, HALF: tl.constexpr, PAIRS: tl.constexpr
):
    """Returns the pairs of the part that is rotated of one head, float32.

    Args:
        source: pointer to the part.
        cos_ptr: pointer to the token's cosines, 2 * HALF of them, of which the second half is read.
        sin_ptr: to its sines, likewise.
        first_place, second_place: from `pairs_of`.
    """
    pairs = tl.arange(0, PAIRS)
    inside = pairs < HALF
    first = tl.load(source + first_place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_place, mask=inside, other=0.0).to(tl.float32)
    # The second half of each table has the sign of the cosine or sine itself.
    cos = tl.load(cos_ptr + HALF + pairs, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def write_latent(
    cache_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    token,
    x_stride,
    cos_stride,
    sin_stride,
    block_stride,
    token_stride,
    block_size,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Normalises a token's latent, rotates its key part, and writes both to the cache, unless its
    slot is -1."""
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        cache_dtype: tl.constexpr = cache_ptr.dtype.element_ty
        source = x_ptr + token * x_stride
        target = cache_ptr + slot // block_size * block_stride + slot % block_size * token_stride
        elements = tl.arange(0, ELEMENTS)
        inside = elements < RANK
        x = tl.load(source + elements, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps)
        weight = tl.load(weight_ptr + elements, mask=inside, other=0.0).to(tl.float32)
        normed = (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        tl.store(target + elements, stored(normed, dtype, cache_dtype), mask=inside)

        first_place, second_place = pairs_of(HALF, IS_INTERLEAVED, PAIRS)
        first, second = rotated_pairs(
            source + RANK, cos_ptr + token * cos_stride, sin_ptr + token * sin_stride,
            first_place, second_place, HALF, PAIRS,
        )  # fmt: skip
        inside = tl.arange(0, PAIRS) < HALF
        keys = target + RANK
        tl.store(keys + first_place, stored(first, dtype, cache_dtype), mask=inside)
        tl.store(keys + second_place, stored(second, dtype, cache_dtype), mask=inside)


@triton.jit
def _write_latents(
    cache_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    x_stride,
    cos_stride,
    sin_stride,
    block_stride,
    token_stride,
    block_size,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    write_latent(
        cache_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr, tl.program_id(0).to(tl.int64),
        x_stride, cos_stride, sin_stride, block_stride, token_stride, block_size, eps,
        RANK, HALF, IS_INTERLEAVED, ELEMENTS, PAIRS,
    )  # fmt: skip


def write_latents(
    cache: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    interleaved: bool = False,
) -> None:
    """Computes the same as ``reference.latent_write.write_latents``, with float32 intermediates.

    Args:
        cache: [blocks, block_size, rank + rope_dim], rows contiguous, any other strides;
            float8_e4m3fn or the dtype of ``x``.
        x: [tokens, rank + rope_dim], each row contiguous; float32, float16 or bfloat16, like all
            other tensors but ``slots``.
        weight: [rank], contiguous.
        eps: that of the latents' norm.
        cos: [tokens, rope_dim], the last dimension contiguous; only the second half is read.
        sin: as ``cos``.
        slots: [tokens] int64; a token whose slot is -1 is not written.
        interleaved: whether neighbouring elements are rotated together.

    One launch a layer, with a program for each token: 1.1 KiB read and written for rank 512 and a
    rope_dim of 64; 2 us for one token, 7 us for 8,192.
    """
    tokens, width = x.shape
    rank, block_size = len(weight), cache.shape[1]
    rope_dim = width - rank
    check_latents(cache, x, weight, cos, sin, slots)
    if tokens == 0:
        return
    _write_latents[(tokens,)](
        as_stored(cache, x.dtype),
        x,
        weight,
        cos,
        sin,
        slots,
        x.stride(0),
        cos.stride(0),
        sin.stride(0),
        *cache.stride()[:2],
        block_size,
        eps,
        RANK=rank,
        HALF=rope_dim // 2,
        IS_INTERLEAVED=interleaved,
        ELEMENTS=next_power_of_two(rank),
        PAIRS=next_power_of_two(rope_dim // 2),
        num_warps=row_warps(rank),
    )


def check_latents(
    cache: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
) -> None:
    """Checks the arguments of `write_latents`."""
    tokens, width = x.shape
    rope_dim = width - len(weight)
    assert rope_dim > 0 == rope_dim % 2, f"{rope_dim} elements have no halves"
    assert cache.shape[2] == width, "the cache has rows of another size"
    assert cos.shape == sin.shape == (tokens, rope_dim), "cos and sin: one row per token"
    assert cache.stride(-1) == 1, "the last dimension must be contiguous"
    for tensor in (x, weight, cos, sin):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.dtype is x.dtype, "all floating tensors have one dtype"
    assert slots.shape == (tokens,), "slots: one per token"
    assert slots.dtype is torch.int64, "slots are int64"
