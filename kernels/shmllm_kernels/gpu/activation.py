"""The activation of the MLP, alone or of one half, times the other half.

It computes the same as `reference.activation`, in float32, and rounds the activation to the
tensors' dtype before the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.functions import sigmoid, tanh

BLOCK = 1024
SPARSE_BLOCK = 4096

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def active(x, NAME: tl.constexpr):
    """Returns a function of x, float32, by its name."""
    if NAME == "silu":
        result = x * sigmoid(x)
    elif NAME == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "quick_gelu":
        result = x * sigmoid(1.702 * x)
    elif NAME == "relu":
        result = tl.maximum(x, 0.0)
    elif NAME == "relu_squared":
        positive = tl.maximum(x, 0.0)
        result = positive * positive
    else:
        tl.static_assert(NAME == "gelu_tanh")
        inner = _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
        result = 0.5 * x * (1.0 + tanh(inner))
    return result


@triton.jit
def bounded(opened, up, bound):
    """Returns activations of gates that are at most the bound, and ups no larger than it, float32;
    NaN stays."""
    opened = tl.where(opened > bound, bound, opened)
    return opened, tl.where(up > bound, bound, tl.where(up < -bound, -bound, up))


@triton.jit
def shifted(gate, up, bound):
    """Returns ``(u + 1) * g * sigmoid(1.702 * g)`` of a bounded gate g and up u, float32."""
    gate, up = bounded(gate, up, bound)
    return gate * sigmoid(1.702 * gate) * (up + 1.0)


@triton.jit
def _activate(
    x_ptr,
    out_ptr,
    in_stride,
    out_stride,
    dim,
    bound,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out_ptr.dtype.element_ty
    source = x_ptr + row * in_stride + columns
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if NAME == "silu_shifted":
        up = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
        value = shifted(value, up, bound).to(dtype)
    elif NAME == "silu_clamped":
        value = active(tl.where(value > bound, bound, value), "silu").to(dtype)
    else:
        value = active(value, NAME).to(dtype)
    if IS_GATED and NAME != "silu_shifted":
        up = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
        if IS_BOUNDED:
            value, up = bounded(value.to(tl.float32), up, bound)
        value = (value.to(tl.float32) * up).to(dtype)
    tl.store(out_ptr + row * out_stride + columns, value, mask=inside)


@triton.jit
def _activate_sparse(
    x_ptr, out_ptr, in_stride, out_stride, dim, deviations, NAME: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    source = x_ptr + row * in_stride
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, dim, BLOCK):
        inside = first + columns < dim
        sums += tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(sums, axis=0) / dim
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, dim, BLOCK):
        inside = first + columns < dim
        gate = tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
        sums += tl.where(inside, (gate - mean) * (gate - mean), 0.0)
    cut = mean + deviations * tl.sqrt(tl.sum(sums, axis=0) / dim)
    for first in range(0, dim, BLOCK):
        inside = first + columns < dim
        gate = tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + dim + first + columns, mask=inside, other=0.0).to(tl.float32)
        value = active(tl.maximum(gate - cut, 0.0), NAME).to(dtype)
        product = (value.to(tl.float32) * up).to(dtype)
        tl.store(out_ptr + row * out_stride + first + columns, product, mask=inside)


def activate(out: Tensor, x: Tensor, name: str, is_gated: bool, bound: float | None = None) -> None:
    """Writes ``reference.activation.activate(x, name, is_gated)`` to ``out``, or, with a bound,
    ``reference.activation.activate_bounded(x, name, bound)``.

    Args:
        out: [rows, dim], each row contiguous, with any stride between rows.
        x: [rows, 2 * dim] if it is gated, the gate in the first half, or [rows, dim]; out's dtype:
            float32, float16 or bfloat16. Rows as those of ``out``.
        name: "silu", "gelu" (with the error function), "gelu_tanh", "quick_gelu", "relu" or
            "relu_squared", or with a bound "silu_clamped" or "silu_shifted", which rounds its
            result alone.
        is_gated: whether ``f(gate) * up`` is written, and not ``f(x)``.
        bound: that of gates and ups, or None; it is gated then.

    Gated, it moves 3 * rows * dim elements, 84 KiB for a row of 14,336; about 6 flops for each
    element of ``out``. One launch a layer: 2 us for one token, 164 us for 8,192.
    """
    rows, dim = out.shape
    width = 2 * dim if is_gated else dim
    assert bound is not None or name not in ("silu_clamped", "silu_shifted"), "it has a bound"
    assert x.shape == (rows, width), "x must be as wide as out, or twice as wide if it is gated"
    assert x.dtype == out.dtype, "x must have out's dtype"
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    if rows == 0 or dim == 0:
        return
    grid = (rows, triton.cdiv(dim, BLOCK))
    strides = x.stride(0), out.stride(0)
    _activate[grid](
        x, out, *strides, dim, 0.0 if bound is None else bound, NAME=name, IS_GATED=is_gated,
        IS_BOUNDED=bound is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def activate_sparse(out: Tensor, x: Tensor, name: str, deviations: float) -> None:
    """Writes ``reference.activation.activate_sparse(x, name, deviations)`` to ``out``.

    Args:
        out: [rows, dim], each row contiguous, with any stride between rows.
        x: [rows, 2 * dim], likewise, the gate in the first half; out's dtype.
        name: see `activate`.
        deviations: by how many standard deviations the cut of a row lies above the mean.

    One program computes a row and reads its gates three times. One launch in each layer of such an
    MLP: 96 KiB for a row of 16,384 in bfloat16.
    """
    rows, dim = out.shape
    assert x.shape == (rows, 2 * dim), "x must be twice as wide as out"
    assert x.dtype == out.dtype, "x must have out's dtype"
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    if rows == 0 or dim == 0:
        return
    block = min(next_power_of_two(dim), SPARSE_BLOCK)
    strides = x.stride(0), out.stride(0)
    _activate_sparse[(rows,)](
        x, out, *strides, dim, deviations, NAME=name, BLOCK=block, num_warps=8
    )
