"""The gated activations of the MLP: SiLU or GELU of one half, times the other.

Computes what `reference.activation` does: in float32, rounded to the tensors' dtype before
the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _gated(
    gate_up_ptr,
    out_ptr,
    in_stride,
    out_stride,
    dim,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype = out_ptr.dtype.element_ty
    gates = gate_up_ptr + row * in_stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + dim, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = 0.5 * gate * (1.0 + _tanh(inner))
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    product = active.to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row * out_stride + columns, product.to(dtype), mask=inside)


def silu_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """Writes ``silu(gate) * up``.

    Args:
        out: [rows, dim], rows of any stride, each contiguous.
        gate_up: [rows, 2 * dim], the gate in the first half; out's dtype: float32, float16 or
            bfloat16. Rows as those of ``out``.

    Moves 3 * rows * dim elements; about 6 flops for each of ``out``.
    """
    _launch(out, gate_up, "silu")


def gelu_and_mul(out: Tensor, gate_up: Tensor, approximate: str = "tanh") -> None:
    """Writes ``gelu(gate) * up``.

    Args:
        out: as for :func:`silu_and_mul`, like ``gate_up``.
        approximate: "tanh", or "none" for the error function.

    Moves 3 * rows * dim elements; about 14 flops for each of ``out``.
    """
    assert approximate in ("tanh", "none"), approximate
    _launch(out, gate_up, "gelu_tanh" if approximate == "tanh" else "gelu_erf")


def _launch(out: Tensor, gate_up: Tensor, kind: str) -> None:
    rows, dim = out.shape
    assert gate_up.shape == (rows, 2 * dim), "gate_up must be twice as wide as out"
    assert gate_up.dtype == out.dtype, "gate_up must have out's dtype"
    assert gate_up.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    if rows == 0 or dim == 0:
        return
    grid = (rows, triton.cdiv(dim, BLOCK))
    strides = gate_up.stride(0), out.stride(0)
    _gated[grid](gate_up, out, *strides, dim, KIND=kind, BLOCK=BLOCK, num_warps=4)
