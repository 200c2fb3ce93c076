"""Kernel functions of heads in registers: they load, normalise and rotate some of them.

A head is a row of DIM_PADDED elements, of which DIM exist.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.reference.rope_write import HeadNorms

NORM_BEFORE = tl.constexpr(1)
NORM_BEHIND = tl.constexpr(2)
"""When heads are normalised: before their rotation, or behind it; 0: they have no norm."""


def norm_order(norms: HeadNorms | None) -> int:
    """Returns when heads are normalised, as kernels know it."""
    if norms is None:
        return 0
    return int((NORM_BEHIND if norms.is_behind else NORM_BEFORE).value)


@triton.jit
def partners(ROTARY_HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Returns, for each element of a head that is rotated, the one it is rotated with, their number
    as a pair, and whether it is the second of them."""
    dims = tl.arange(0, DIM_PADDED)
    if IS_INTERLEAVED:
        pair, is_second = dims // 2, dims % 2 == 1
        partner = tl.where(is_second, dims - 1, dims + 1)
    else:
        half: tl.constexpr = max(ROTARY_HALF, 1)
        pair, is_second = dims % half, dims >= half
        partner = tl.where(is_second, dims - half, dims + half)
    return partner, pair, is_second


@triton.jit
def load_heads(
    rows, is_row, partner, ROTARY_HALF: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """Returns heads given by their addresses, [rows, DIM_PADDED], and for each element its
    partner."""
    dims = tl.arange(0, DIM_PADDED)
    x = tl.load(
        rows[:, None] + dims[None, :], mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0
    )
    other = x
    if ROTARY_HALF:
        wanted = is_row[:, None] & (dims < 2 * ROTARY_HALF)[None, :]
        other = tl.load(rows[:, None] + partner[None, :], mask=wanted, other=0.0)
    return x.to(tl.float32), other.to(tl.float32)


@triton.jit
def load_weights(
    weight_ptr, heads, partner, offset,
    NORM: tl.constexpr, ROTARY_HALF: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns a norm's weight for each element of heads and for its partner, [heads, DIM_PADDED] or
    [1, DIM_PADDED], or 1. The weights of heads lie side by side; None: all heads have the same."""
    weight, other = 1.0, 1.0
    if NORM:
        dims = tl.arange(0, DIM_PADDED)
        inside, is_rotated = dims < DIM, dims < 2 * ROTARY_HALF
        if heads is not None:
            begin = heads[:, None] * DIM
            dims, partner = begin + dims[None, :], begin + partner[None, :]
            inside, is_rotated = inside[None, :], is_rotated[None, :]
        weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32) + offset
        other = weight
        if ROTARY_HALF:
            other = (
                tl.load(weight_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32) + offset
            )
        if heads is None:
            weight, other = weight[None, :], other[None, :]
    return weight, other


@triton.jit
def load_biases(
    weight_ptr, partner,
    CENTERING: tl.constexpr, ROTARY_HALF: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns a norm's bias for each element of heads and for its partner, [1, DIM_PADDED], or 0.
    Biases are behind the weights."""
    bias, other = 0.0, 0.0
    if CENTERING == 2:
        dims = tl.arange(0, DIM_PADDED)
        bias = tl.load(weight_ptr + DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        other = bias
        if ROTARY_HALF:
            is_rotated = dims < 2 * ROTARY_HALF
            other = tl.load(weight_ptr + DIM + partner, mask=is_rotated, other=0.0).to(tl.float32)
        bias, other = bias[None, :], other[None, :]
    return bias, other


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, cos_stride, sin_stride, tokens, is_token, pair, is_second,
    ROTARY_HALF: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns for some tokens the cosine for each element of a head, and the sine with the sign
    with which its partner counts, [tokens, DIM_PADDED] each."""
    cos, sin = 1.0, 0.0
    if ROTARY_HALF:
        is_rotated = tl.arange(0, DIM_PADDED) < 2 * ROTARY_HALF
        wanted = is_token[:, None] & is_rotated[None, :]
        # The second half of each table has the sign of the cosine or sine itself.
        angle = (ROTARY_HALF + pair)[None, :]
        cos = tl.load(cos_ptr + tokens[:, None] * cos_stride + angle, mask=wanted, other=1.0)
        sin = tl.load(sin_ptr + tokens[:, None] * sin_stride + angle, mask=wanted, other=0.0)
        cos, sin = cos.to(tl.float32), sin.to(tl.float32)
        sin = tl.where(is_second[None, :], sin, -sin)
    return cos, sin


@triton.jit
def rotated(
    x, other, weight, other_weight, bias, other_bias, scale, cos, sin, eps,
    dtype: tl.constexpr, ROTARY_HALF: tl.constexpr, NORM: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
    CENTERING: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Returns normalised and rotated heads, float32. It rounds where the reference does, but not
    the result. The angles are those of each head, or of the only token. The norm's scale is
    [heads, 1]; None: that of a norm over each head, as all are behind a rotation."""
    if NORM == NORM_BEFORE:
        if CENTERING:
            mean = _mean_of_heads(x, DIM)
            x, other = _centered(x, mean, DIM), other - mean
        if scale is None:
            scale = _scale_of_heads(x, eps, DIM)
        x = _scaled(x, scale, weight, bias, dtype, ROUNDS_ONCE)
        other = _scaled(other, scale, other_weight, other_bias, dtype, ROUNDS_ONCE)
    if ROTARY_HALF:
        x = x * cos + other * sin
    if NORM == NORM_BEHIND:
        x = x.to(dtype).to(tl.float32)
        if CENTERING:
            x = _centered(x, _mean_of_heads(x, DIM), DIM)
        x = _scaled(x, _scale_of_heads(x, eps, DIM), weight, bias, dtype, ROUNDS_ONCE)
    return x


@triton.jit
def _mean_of_heads(x, DIM: tl.constexpr):
    """Returns the mean of each head, [heads, 1]."""
    return (tl.sum(x, axis=1) / DIM)[:, None]


@triton.jit
def _centered(x, mean, DIM: tl.constexpr):
    """Returns heads less their means, [heads, DIM_PADDED], with zeros behind the heads."""
    inside = (tl.arange(0, x.shape[1]) < DIM)[None, :]
    return tl.where(inside, x - mean, 0.0)


@triton.jit
def _scale_of_heads(x, eps, DIM: tl.constexpr):
    """Returns what a norm over each head multiplies heads by, [heads, 1]."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]


@triton.jit
def _scaled(x, scale, weight, bias, dtype: tl.constexpr, ROUNDS_ONCE: tl.constexpr):
    """Returns heads times their scale and the norm's weights, and its bias added."""
    x *= scale
    if not ROUNDS_ONCE:
        x = x.to(dtype).to(tl.float32)
    return (x * weight + bias).to(dtype).to(tl.float32)


@triton.jit
def normed_value(value, eps, HAS_NORM: tl.constexpr, DIM: tl.constexpr):
    """Returns value heads, [heads, DIM_PADDED] float32, with their norm."""
    if HAS_NORM:
        value *= _scale_of_heads(value, eps, DIM)
    return value


@triton.jit
def query_factor(position, growth):
    """Returns the factor of queries of some positions; see `QueryGrowth`."""
    place = position + growth.offset
    steps, ratio = (place // growth.length).to(tl.float32), place.to(tl.float32) / growth.length
    power = tl.exp(growth.power * tl.log(1.0 + ratio))
    return power * (1.0 + growth.rate * tl.log(1.0 + steps))
