"""Rows whose last elements rotate, in pairs of neighbours: heads of queries, which are divided by
their root mean square, keys, which have a norm and go to the cache, and outputs of heads, which are
rotated back.

The kernels compute the same as `reference.last_rotated`, in float32, and round norms and results to
the dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two, row_warps
from shmllm_kernels.gpu.rope_write import stored

ROWS = 4
"""The heads that a program rotates."""
BLOCK = 1024
"""The columns that a program stores."""


@triton.jit
def normed(x, weight, eps, dtype: tl.constexpr, DIM: tl.constexpr):
    """Returns rows [rows, padded dim] float32, zeros behind DIM, over their root mean square, times
    a weight; None: there is none. Both are rounded."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    x = (x * scale[:, None]).to(dtype).to(tl.float32)
    if weight is not None:
        x = (x * weight[None, :]).to(dtype).to(tl.float32)
    return x


@triton.jit
def last_rotated(
    x, cos_ptr, sin_ptr,
    HALF: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr,
    IS_BACK: tl.constexpr,
):  # fmt: skip
    """Returns rows [ROWS, DIM_PADDED] float32, whose last 2 * HALF elements of DIM are rotated.

    Args:
        cos_ptr: pointer to the cosines of all rows, 2 * HALF of them, of which the second half is
            read.
        sin_ptr: to the sines, likewise.
        IS_BACK: whether they are rotated by the negated angles.
    """
    PAIRS: tl.constexpr = DIM_PADDED // 2
    angles = tl.arange(0, PAIRS) - (DIM // 2 - HALF)
    rotates = (angles >= 0) & (angles < HALF)
    # The second half of each table has the sign of the cosine or sine itself.
    cos = tl.load(cos_ptr + HALF + angles, mask=rotates, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + HALF + angles, mask=rotates, other=0.0).to(tl.float32)[None, :]
    if IS_BACK:
        sin = -sin
    first, second = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    both = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(both, (ROWS, DIM_PADDED))


@triton.jit
def _rotate_heads(
    x_ptr, cos_ptr, sin_ptr, token_stride, head_stride, cos_stride, sin_stride, eps,
    HAS_NORM: tl.constexpr, IS_BACK: tl.constexpr, NUM_HEADS: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    inside = (heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
    places = x_ptr + token * token_stride + heads[:, None] * head_stride + dims[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = normed(x, None, eps, dtype, DIM)
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    x = last_rotated(x, cos_ptr, sin_ptr, HALF, DIM, ROWS, DIM_PADDED, IS_BACK)
    tl.store(places, x.to(dtype), mask=inside)


@triton.jit
def _store_keys(
    cache_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr, x_stride, cos_stride, sin_stride,
    block_stride, token_stride, block_size, eps,
    HALF: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, DIM_PADDED)
    inside = dims < DIM
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * x_stride + dims, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    x = normed(x[None, :], weight, eps, dtype, DIM)
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    x = last_rotated(x, cos_ptr, sin_ptr, HALF, DIM, 1, DIM_PADDED, False)
    target = cache_ptr + slot // block_size * block_stride + slot % block_size * token_stride
    tl.store(target + dims[None, :], stored(x, dtype, dtype), mask=inside[None, :])


@triton.jit
def _store_rows(
    cache_ptr, x_ptr, slots_ptr, x_stride, block_stride, token_stride, block_size, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * x_stride + columns, mask=columns < width, other=0.0)
    target = cache_ptr + slot // block_size * block_stride + slot % block_size * token_stride
    tl.store(target + columns, x, mask=columns < width)


def rotate_heads(
    x: Tensor, cos: Tensor, sin: Tensor, eps: float | None = None, is_back: bool = False
) -> None:
    """Computes ``reference.last_rotated.rotate_heads`` in place.

    Args:
        x: [tokens, heads, dim], the last dimension contiguous; float32, float16 or bfloat16, like
            ``cos`` and ``sin``. dim is even.
        cos: [tokens, rope_dim], rows contiguous; only the second half is read.
        sin: as ``cos``.
        eps: that of the mean of squares of a head; None: heads are not divided.
        is_back: whether they are rotated back.

    Two launches a layer: for 64 heads of 512 elements in bfloat16 64 KiB are read and written for
    each token, 2 us for one, the time of a launch, and 0.26 ms for 8,192.
    """
    tokens, heads, dim = x.shape
    _check(x, cos, sin, dim)
    if tokens == 0 or heads == 0:
        return
    _rotate_heads[(tokens, triton.cdiv(heads, ROWS))](
        x, cos, sin, *x.stride()[:2], cos.stride(0), sin.stride(0), 0.0 if eps is None else eps,
        HAS_NORM=eps is not None, IS_BACK=is_back, NUM_HEADS=heads, HALF=cos.shape[1] // 2,
        DIM=dim, ROWS=ROWS, DIM_PADDED=next_power_of_two(dim), num_warps=4,
    )  # fmt: skip


def store_keys(
    cache: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, slots: Tensor
) -> None:
    """Computes ``reference.last_rotated.store_keys``.

    Args:
        cache: [blocks, block_size, dim], rows contiguous, any other strides.
        x: [tokens, dim], rows contiguous, in the dtype of all floating tensors: float32, float16 or
            bfloat16. dim is even.
        weight: [dim], of the norm.
        eps: its eps.
        cos, sin: see `rotate_heads`.
        slots: [tokens] int64, block * block_size + offset; a token whose slot is -1 is not written.

    One launch a layer, with a program for each token: 2 KiB of 512 elements in bfloat16.
    """
    tokens, dim = x.shape
    _check(x, cos, sin, dim)
    assert cache.shape[2] == len(weight) == dim, "cache and weight are as wide as keys"
    assert cache.stride(2) == weight.stride(0) == 1, "rows must be contiguous"
    assert cache.dtype is weight.dtype is x.dtype, "all floating tensors have one dtype"
    if tokens == 0:
        return
    _store_keys[(tokens,)](
        cache, x, weight, cos, sin, slots, x.stride(0), cos.stride(0), sin.stride(0),
        *cache.stride()[:2], cache.shape[1], eps, HALF=cos.shape[1] // 2, DIM=dim,
        DIM_PADDED=next_power_of_two(dim), num_warps=row_warps(dim),
    )  # fmt: skip


def store_rows(cache: Tensor, x: Tensor, slots: Tensor) -> None:
    """Writes rows [tokens, width] to slots of a cache [blocks, block_size, width]; see
    `store_keys`. A token whose slot is -1 is not written.

    One launch a layer with entries: what a token contributes to them, 5 KiB of 2,560 elements in
    bfloat16, is read and written.
    """
    tokens, width = x.shape
    assert cache.shape[2] == width, "the cache has rows of another size"
    assert cache.stride(2) == x.stride(1) == 1, "rows must be contiguous"
    assert cache.dtype is x.dtype, "the cache has x's dtype"
    if tokens == 0:
        return
    _store_rows[(tokens, triton.cdiv(width, BLOCK))](
        cache, x, slots, x.stride(0), *cache.stride()[:2], cache.shape[1], width, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip


def _check(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> None:
    assert dim % 2 == 0, "rows are pairs"
    assert cos.shape == sin.shape, "sin must have cos' shape"
    assert len(cos) == len(x), "cos and sin: one row for each token"
    assert 0 < cos.shape[1] <= dim, "some elements rotate, and no more than there are"
    assert torch.is_floating_point(x), "rows have a floating dtype"
    for tensor in (x, cos, sin):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.dtype is x.dtype, "all floating tensors have one dtype"
