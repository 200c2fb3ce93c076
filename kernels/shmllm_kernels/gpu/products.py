"""Products of rows with rows of weights: the loop over a row, and the product with packed weights.

The loop serves weights of every kind; `unpacking` turns packed ones into values in registers, which
are rounded to the dtype of the activations. A sum is added in the order of the elements: tiles of
other sizes differ only by how the tensor cores add within an instruction.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import ProductConfig
from shmllm_kernels.gpu.packings import RUN, PackedRows, Rows
from shmllm_kernels.gpu.unpacking import FLAGS, half_run


@triton.jit
def multiply(
    x_rows,
    is_row,
    weight_ptr,
    parameters_ptr,
    places,
    is_column,
    k,
    weight_stride,
    parameters_stride,
    PACKING: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns [BLOCK_M, BLOCK_N] float32: rows of x, given by their addresses, times rows of the
    weights, given by their indices."""
    weight_rows = weight_ptr + places * weight_stride
    if PACKING is None:
        return _multiply_numbers(
            x_rows, is_row, weight_rows, is_column, k, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        parameter_rows = parameters_ptr + places * parameters_stride
        return _multiply_packed(
            x_rows, is_row, weight_rows, parameter_rows, is_column, k,
            PACKING, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _multiply_numbers(
    x_rows,
    is_row,
    weight_rows,
    is_column,
    k,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        depth = begin + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(x_rows[:, None] + depth[None, :], mask=is_row[:, None], other=0.0)
            weight_mask = is_column[None, :]
        else:
            inside = depth < k
            x_mask = is_row[:, None] & inside[None, :]
            x = tl.load(x_rows[:, None] + depth[None, :], mask=x_mask, other=0.0)
            weight_mask = is_column[None, :] & inside[:, None]
        weight = tl.load(weight_rows[None, :] + depth[:, None], mask=weight_mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    return total


@triton.jit
def _multiply_packed(
    x_rows,
    is_row,
    weight_rows,
    parameter_rows,
    is_column,
    k,
    PACKING: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiplies BLOCK_K // 64 runs in an iteration, each in two halves."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        for i in tl.static_range(BLOCK_K // 64):
            first = begin + 64 * i
            is_there = is_column
            if not EVEN_K:
                is_there = is_column & (first < k)
            for half in tl.static_range(2):
                weight = half_run(
                    weight_rows, parameter_rows, first // 64, is_there, k, half, PACKING
                )
                depth = first + 32 * half + tl.arange(0, 32)
                x_mask = is_row[:, None]
                if not EVEN_K:
                    x_mask = x_mask & (depth < k)[None, :]
                x = tl.load(x_rows[:, None] + depth[None, :], mask=x_mask, other=0.0)
                total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    out_ptr,
    x_ptr,
    weight_ptr,
    parameters_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    k,
    out_stride,
    x_stride,
    weight_stride,
    parameters_stride,
    HAS_BIAS: tl.constexpr,
    PACKING: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < num_columns
    result = multiply(
        x_ptr + rows * x_stride, is_row, weight_ptr, parameters_ptr, columns, is_column,
        k, weight_stride, parameters_stride, PACKING, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        result += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    targets = out_ptr + rows[:, None] * out_stride + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(targets, result.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    out: Tensor, x: Tensor, weight: PackedRows, bias: Tensor | None, config: ProductConfig
) -> None:
    """Writes ``x @ values.T + bias``, where the values of the weights are rounded to x's dtype.

    Sums are float32, the bias is added to them, and the result is rounded once.

    Args:
        out: [rows, columns], x's dtype, each row contiguous, with any stride between rows.
        x: [rows, k], float32, float16 or bfloat16, rows as those of ``out``.
        weight: [columns, k].
        bias: [columns] contiguous, x's dtype, or None.
        config: the tile sizes, from `configs.packed_config`.

    Reads the packed weights once for each ``config.block_m`` rows: 4 bits and a float16 for each
    group of 32 make 4,096 x 14,336 weights 33 MB, 8 us at 4.3 TB/s; in bfloat16 they are 117 MB,
    27 us.
    """
    num_rows, k = x.shape
    num_columns = weight.codes.shape[0]
    assert weight.shape == (num_columns, k), "weights: a row of k for each column"
    assert out.shape == (num_rows, num_columns), "out: a row for each of x"
    assert out.dtype is x.dtype, "out and x have one dtype"
    assert out.stride(1) == x.stride(1) == 1, "rows must be contiguous"
    assert bias is None or bias.shape == (num_columns,), "bias: one for each column"
    assert bias is None or bias.is_contiguous(), "bias must be contiguous"
    assert bias is None or bias.dtype is x.dtype, "bias and x have one dtype"
    check_rows(weight)
    if num_rows == 0:
        return
    grid = triton.cdiv(num_rows, config.block_m), triton.cdiv(num_columns, config.block_n)
    _linear[grid](
        out,
        x,
        *memory_of(weight),
        x if bias is None else bias,
        num_rows,
        num_columns,
        k,
        out.stride(0),
        x.stride(0),
        *strides_of(weight),
        HAS_BIAS=bias is not None,
        **options(weight, config),
    )


def memory_of(weight: Rows) -> tuple[Tensor, Tensor]:
    """Returns the weights and their parameters, as kernels take them."""
    if isinstance(weight, Tensor):
        return weight, weight
    return weight.codes, weight.parameters


def strides_of(weight: Rows) -> tuple[int, int]:
    """Returns the elements from one row to the next in each tensor of `memory_of`."""
    if isinstance(weight, Tensor):
        return weight.shape[-1], 0
    return weight.codes.shape[-1], weight.parameters.shape[-1]


def options(weight: Rows, config: ProductConfig) -> dict[str, Any]:
    """Returns the constants of a kernel that calls `multiply`."""
    packing = None if isinstance(weight, Tensor) else weight.packing
    assert packing is None or config.block_k % RUN == 0, "an iteration takes whole runs"
    return {
        "PACKING": packing,
        "EVEN_K": weight.shape[-1] % config.block_k == 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **({} if packing is None else FLAGS),
    }


def check_rows(weight: Rows) -> None:
    """Asserts that rows lie one after the other."""
    first, second = memory_of(weight)
    assert first.is_contiguous(), "weights must be contiguous"
    assert second.is_contiguous(), "parameters must be contiguous"
