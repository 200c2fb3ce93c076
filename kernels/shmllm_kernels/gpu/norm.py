"""RMSNorm and LayerNorm of rows, alone and fused with the addition to the residual stream.

It computes the same as `reference.norm` and rounds in the same places: the sum, and, if the weight
has no offset, the quotient before the weight is applied, are rounded to the rows' dtype; statistics
are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.configs import next_power_of_two, row_warps

MAX_DIM = 65_536


@dataclass(frozen=True, slots=True)
class NormedPair:
    """What stands for the rows whose norm is added: ``own_norm(rows) + norm(others)``, rounded. All
    norms have one eps and one offset.

    Attributes:
        x: [rows, dim], the others, each row contiguous; the rows' dtype.
        weight: [dim], contiguous, the weight of their norm.
        own_weight: [dim], contiguous, the weight of the norm of the rows themselves.
    """

    x: Tensor
    weight: Tensor
    own_weight: Tensor


class _Pair(NamedTuple):
    """A `NormedPair` as a kernel takes it."""

    x: Any
    weight: Any
    own_weight: Any
    stride: Any


@triton.jit
def normed_row(x, weight, dim, eps, offset, HAS_OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Returns the RMSNorm of a row of ``dim`` elements, which are float32 and 0 behind those, in
    the dtype."""
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / dim + eps)
    if HAS_OFFSET:
        normed *= weight + offset
    else:
        normed = normed.to(dtype).to(tl.float32) * weight
    return normed.to(dtype)


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    dim,
    eps,
    x_scale,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out_ptr.dtype.element_ty
    # No load comes behind the store: it would be a round trip of its own.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_DEPENDENT:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        x *= x_scale
    if HAS_RESIDUAL:
        places = residual_ptr + row * residual_stride + columns
        total = (x + tl.load(places, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(places, total, mask=inside)
        x = total.to(tl.float32)
    normed = normed_row(x, weight, dim, eps, offset, HAS_OFFSET, dtype)
    tl.store(out_ptr + row * out_stride + columns, normed, mask=inside)


@triton.jit
def _add_normed(
    x_ptr, residual_ptr, weight_ptr, factor_ptr, pair, x_stride, residual_stride, dim, eps, x_scale,
    offset, HAS_OFFSET: tl.constexpr, IS_DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = residual_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_DEPENDENT:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    places = residual_ptr + row * residual_stride + columns
    before = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if pair is not None:
        others = pair.x + row * pair.stride + columns
        other = tl.load(others, mask=inside, other=0.0).to(tl.float32)
        own_weight = tl.load(pair.own_weight + columns, mask=inside, other=0.0).to(tl.float32)
        other_weight = tl.load(pair.weight + columns, mask=inside, other=0.0).to(tl.float32)
        x = normed_row(x, own_weight, dim, eps, offset, HAS_OFFSET, dtype).to(tl.float32)
        x += normed_row(other, other_weight, dim, eps, offset, HAS_OFFSET, dtype).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    normed = normed_row(x, weight, dim, eps, offset, HAS_OFFSET, dtype)
    total = (before + normed.to(tl.float32) * x_scale).to(dtype)
    if factor_ptr is not None:
        total = (total.to(tl.float32) * tl.load(factor_ptr).to(tl.float32)).to(dtype)
    tl.store(places, total, mask=inside)


@triton.jit
def _layer_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    dim,
    eps,
    x_scale,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        x *= x_scale
    if HAS_RESIDUAL:
        places = residual_ptr + row * residual_stride + columns
        total = (x + tl.load(places, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(places, total, mask=inside)
        x = total.to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, axis=0) / dim, 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / dim + eps)
    normed *= weight
    if HAS_BIAS:
        normed += bias
    tl.store(out_ptr + row * out_stride + columns, normed.to(dtype), mask=inside)


def rms_norm(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    is_dependent: bool = False,
) -> None:
    """Writes ``reference.norm.rms_norm(x, weight, eps, offset)`` to ``out``.

    Args:
        out: [rows, dim], each row contiguous, with any stride between rows; may be ``x``.
        x: [rows, dim], out's dtype: float32, float16 or bfloat16. Rows as those of ``out``.
        weight: [dim], contiguous, out's dtype.
        eps: added to the mean square.
        offset: added to the weight, in float32.
        is_dependent: whether the launch may begin before the launch before it has ended, from
            compute capability 9.0 on. The weight must be complete by then.

    Moves 2 * rows * dim elements; 4 flops for each. One launch a step, before the first layer.
    """
    _launch(out, x, None, weight, eps, 1.0, offset, is_dependent)


def add_rms_norm(
    out: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: float = 1.0,
    offset: float = 0.0,
    is_dependent: bool = False,
) -> None:
    """Adds ``scale * x`` to the residual stream, in place, and writes the norm of the sum.

    Args:
        out: [rows, dim], each row contiguous, with any stride between rows; may be ``x``.
        x: [rows, dim], the output of the previous block; out's dtype.
        residual: [rows, dim], out's dtype; becomes ``residual + scale * x``.
        weight: [dim], contiguous, out's dtype.
        eps: added to the mean square.
        scale: the factor of ``x`` in the sum.
        offset: added to the weight, in float32.
        is_dependent: see `rms_norm`.

    Moves 4 * rows * dim elements, 32 KiB for a row of 4,096; 5 flops for each element of ``x``.
    64 launches a step of 32 layers: 2 us each for one token, 62 us for 8,192.
    """
    _launch(out, x, residual, weight, eps, scale, offset, is_dependent)


def add_normed(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: float = 1.0,
    offset: float = 0.0,
    factor: Tensor | None = None,
    pair: NormedPair | None = None,
    is_dependent: bool = False,
) -> None:
    """Adds ``scale * rms_norm(x)`` to the residual stream, in place. The norm is rounded before the
    sum, and the sum before its factor.

    Args:
        x: [rows, dim], the output of a block, each row contiguous; residual's dtype.
        residual: [rows, dim], likewise; becomes ``(residual + scale * rms_norm(x)) * factor``.
        weight, eps, offset: those of the norm; see `rms_norm`.
        scale: the factor of the norm in the sum.
        factor: [1], residual's dtype, the factor of the sum; None: it has none.
        pair: what stands for ``x``, of which ``x`` is one part; None: ``x`` does.
        is_dependent: see `rms_norm`.

    Moves 3 * rows * dim elements, 4 with a pair. In steps of few tokens, one launch of 1.5 us where
    a norm and a sum are two launches; with a pair (one a layer of Gemma 4's mixtures) where three
    norms, two sums and a product with a factor are six.
    """
    rows, dim = x.shape
    _check(x, x, residual, weight)
    assert factor is None or (factor.numel() == 1 and factor.dtype is x.dtype), "one factor"
    operands = None
    if pair is not None:
        _check(x, pair.x, residual, pair.weight)
        _check(x, x, None, pair.own_weight)
        operands = _Pair(pair.x, pair.weight, pair.own_weight, pair.x.stride(0))
    if rows == 0:
        return
    num_warps = row_warps(dim if pair is None else 2 * dim)
    _add_normed[(rows,)](
        x, residual, weight, factor, operands, x.stride(0), residual.stride(0), dim, eps, scale,
        offset, HAS_OFFSET=offset != 0, IS_DEPENDENT=is_dependent, BLOCK=next_power_of_two(dim),
        num_warps=num_warps, **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip


def layer_norm(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    scale: float = 1.0,
    offset: float = 0.0,
) -> None:
    """Writes ``reference.norm.layer_norm(x, weight, bias, eps, offset)`` to ``out``, or, with a
    residual stream, adds ``scale * x`` to it, in place, and writes the norm of the sum.

    Args:
        out: [rows, dim], each row contiguous, with any stride between rows; may be ``x``.
        x: [rows, dim], out's dtype: float32, float16 or bfloat16. Rows as those of ``out``.
        weight: [dim], contiguous, out's dtype.
        bias: as ``weight``, or None.
        eps: added to the variance.
        residual: [rows, dim], out's dtype; becomes ``residual + scale * x``.
        scale: the factor of ``x`` in the sum.
        offset: added to the weight, in float32.

    Moves as many elements as `rms_norm` or `add_rms_norm`, in as many launches: with 4,096 in
    bfloat16, 4.2 MB for 256 rows, or 8.4 MB with a residual stream, 2 us.
    """
    rows, dim = x.shape
    _check(out, x, residual, weight)
    assert bias is None or bias.shape == (dim,), "bias must be [dim]"
    if rows == 0:
        return
    added = x if residual is None else residual
    _layer_norm[(rows,)](
        x,
        added,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        added.stride(0),
        out.stride(0),
        dim,
        eps,
        scale,
        offset,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALE=scale != 1,
        HAS_BIAS=bias is not None,
        BLOCK=next_power_of_two(dim),
        num_warps=row_warps(dim),
    )


def _launch(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: float,
    offset: float,
    is_dependent: bool,
) -> None:
    rows, dim = x.shape
    _check(out, x, residual, weight)
    if rows == 0:
        return
    added = x if residual is None else residual
    _rms_norm[(rows,)](
        x,
        added,
        weight,
        out,
        x.stride(0),
        added.stride(0),
        out.stride(0),
        dim,
        eps,
        scale,
        offset,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALE=scale != 1,
        HAS_OFFSET=offset != 0,
        IS_DEPENDENT=is_dependent,
        BLOCK=next_power_of_two(dim),
        num_warps=row_warps(dim),
        **({"launch_pdl": True} if is_dependent else {}),
    )


def _check(out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    dim = x.shape[1]
    assert out.shape == x.shape, "out must have x's shape"
    assert out.dtype == x.dtype, "out must have x's dtype"
    assert out.stride(1) == x.stride(1) == 1, "rows must be contiguous"
    assert weight.shape == (dim,), "weight must be [dim]"
    assert weight.stride(0) == 1, "weight must be contiguous"
    assert weight.dtype == x.dtype, "weight must have x's dtype"
    assert 0 < dim <= MAX_DIM, f"rows of {dim} elements do not fit into registers"
    if residual is not None:
        assert residual.shape == x.shape, "residual must have x's shape"
        assert residual.dtype == x.dtype, "residual must have x's dtype"
        assert residual.stride(1) == 1, "rows of residual must be contiguous"
