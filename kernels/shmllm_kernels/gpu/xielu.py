"""The activation xIELU (Huang and Schlag, 2024), whose numbers a model learns for each layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.activation import BLOCK
from shmllm_kernels.gpu.functions import exp_remainder, softplus


@triton.jit
def _xielu(x_ptr, out_ptr, numbers_ptr, in_stride, out_stride, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    linear, bound = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    squared = softplus(tl.load(numbers_ptr))
    exponential = softplus(tl.load(numbers_ptr + 1)) + linear
    x = tl.load(x_ptr + row * in_stride + columns, mask=inside, other=0.0).to(tl.float32)
    below = tl.minimum(x, bound)
    negative = (exp_remainder(below) + (below - x)) * exponential
    value = tl.where(x > 0.0, squared * x * x, negative) + linear * x
    value = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, value, mask=inside)


def xielu(out: Tensor, x: Tensor, numbers: Tensor) -> None:
    """Writes ``reference.activation.xielu(x, numbers)`` to ``out``.

    Args:
        out: [rows, dim], each row contiguous, with any stride between rows.
        x: [rows, dim], out's dtype: float32, float16 or bfloat16. Rows as those of ``out``.
        numbers: [4] float32; see `reference.activation.xielu`.

    It moves 2 * rows * dim elements; about 20 flops for each. One launch a layer.
    """
    rows, dim = out.shape
    assert x.shape == out.shape, "x must be as wide as out"
    assert x.dtype == out.dtype, "x must have out's dtype"
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    if rows == 0 or dim == 0:
        return
    grid = (rows, triton.cdiv(dim, BLOCK))
    strides = x.stride(0), out.stride(0)
    _xielu[grid](x, out, numbers, *strides, dim, BLOCK=BLOCK, num_warps=4)
