"""The inputs that each layer has of its own (Gemma 3n and 4): a norm with a lookup, and a gate.

They compute the same as `reference.per_layer`, in float32, and round the results once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.activation import active
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.row_copies import source_of

BLOCK = 1024
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _embed(
    x_ptr,
    table_ptr,
    ids_ptr,
    last_tokens_ptr,
    weight_ptr,
    x_stride,
    table_stride,
    width,
    eps,
    scale,
    table_scale,
    num_tokens,
    padding,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    token = source_of(ids_ptr, last_tokens_ptr, row, True, True).to(tl.int64)
    token = tl.where((token < 0) | (token >= num_tokens), padding, token)
    places = x_ptr + row * x_stride + first + columns
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32) * scale
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    x *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    found = tl.load(table_ptr + token * table_stride + first + columns, mask=inside, other=0.0)
    x = (x + found.to(tl.float32) * table_scale) * _SQRT_HALF
    tl.store(places, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate(
    inputs_ptr, x_ptr, inputs_stride, x_stride, width, NAME: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    value = active(x.to(tl.float32), NAME)
    places = inputs_ptr + row * inputs_stride + columns
    inputs = tl.load(places, mask=inside, other=0.0)
    tl.store(places, (value * inputs.to(tl.float32)).to(x_ptr.dtype.element_ty), mask=inside)


def embed_per_layer(
    x: Tensor,
    table: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    weight: Tensor,
    eps: float,
    scale: float,
    table_scale: float,
    padding: int,
) -> None:
    """Replaces ``x``, the projections, by ``reference.per_layer.embed_per_layer``.

    Args:
        x: [tokens, layers * width], each row contiguous.
        table: [vocabulary, layers * width], likewise, x's dtype.
        token_ids: [tokens] int64, contiguous, as for `row_copies.embed`: -2 - row stands for the
            row's token in ``last_tokens``.
        last_tokens: [rows] int64, contiguous.
        weight: [width], contiguous, x's dtype.
        eps, scale, table_scale, padding: see the reference.

    One launch a step. It reads and writes ``x`` and reads a row of the table for each token: 54 KB
    for a token of 35 layers of 256 in bfloat16.
    """
    width = len(weight)
    assert x.shape[1] == table.shape[1], "table: as wide as x"
    assert x.shape[1] % width == 0, "x: a part for each layer"
    assert x.stride(1) == table.stride(1) == 1, "rows must be contiguous"
    assert x.dtype == table.dtype == weight.dtype, "all floating tensors have one dtype"
    if len(x) == 0:
        return
    _embed[(len(x), x.shape[1] // width)](
        x,
        table,
        token_ids,
        last_tokens,
        weight,
        x.stride(0),
        table.stride(0),
        width,
        eps,
        scale,
        table_scale,
        len(table),
        padding,
        BLOCK=next_power_of_two(width),
        num_warps=1,
    )


def gate_layer_input(inputs: Tensor, x: Tensor, name: str) -> None:
    """Replaces ``inputs`` by ``reference.per_layer.gate_layer_input(x, inputs, name)``.

    Args:
        inputs: [tokens, width], each row contiguous.
        x: the same shape and dtype, each row contiguous.
        name: "silu", "gelu" or "gelu_tanh".

    One launch a layer; 1.5 KB for a token of 256 elements in bfloat16.
    """
    assert x.shape == inputs.shape, "x: the shape of the inputs"
    assert x.stride(1) == inputs.stride(1) == 1, "rows must be contiguous"
    assert x.dtype == inputs.dtype, "x: the dtype of the inputs"
    if len(x) == 0:
        return
    width = x.shape[1]
    grid = len(x), triton.cdiv(width, BLOCK)
    strides = inputs.stride(0), x.stride(0)
    _gate[grid](inputs, x, *strides, width, NAME=name, BLOCK=BLOCK, num_warps=4)
