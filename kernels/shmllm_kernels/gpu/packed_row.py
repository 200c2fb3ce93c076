"""The product of one row with a packed matrix, together with the operations around it.

It is `single_row` for weights that `unpacking` reads. A program computes a few columns, and in each
iteration some runs of their rows: every pair of a column and a run is unpacked by itself, into [32,
pairs] values of each half. They are rounded to the row's dtype, as in products of more rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import packed_row_config
from shmllm_kernels.gpu.packings import RUN, PackedRows
from shmllm_kernels.gpu.products import check_rows, memory_of, strides_of
from shmllm_kernels.gpu.single_row import (
    Activation,
    RowNorm,
    begin,
    finished,
    load_if,
    rows_of_columns,
    wait,
)
from shmllm_kernels.gpu.unpacking import FLAGS, half_run


@triton.jit
def _half_tile(
    code_rows, parameter_rows, run, is_column, k, HALF: tl.constexpr, PACKING: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Returns a half of each pair's run, [32, pairs] in the row's dtype."""
    is_there = is_column & (run * 64 < k)
    return half_run(code_rows, parameter_rows, run, is_there, k, HALF, PACKING).to(dtype)


@triton.jit
def _half_row(x_ptr, norm_ptr, run, k, offset, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Returns the row's elements beside half a run of each pair, times those of the norm's weight,
    and their squares, [32, pairs] float32."""
    ks = (run * 64)[None, :] + HALF * 32 + tl.arange(0, 32)[:, None]
    x = tl.load(x_ptr + ks, mask=ks < k, other=0.0).to(tl.float32)
    squares = x * x
    if HAS_NORM:
        x *= tl.load(norm_ptr + ks, mask=ks < k, other=0.0).to(tl.float32) + offset
    return x, squares


@triton.jit
def _by_column(of_pairs, BLOCK_N: tl.constexpr, RUNS: tl.constexpr):
    """Returns the sums over the runs of each column."""
    return tl.sum(tl.reshape(tl.sum(of_pairs, axis=0), (BLOCK_N, RUNS)), axis=1)


@triton.jit
def multiply_packed_row(
    out_ptr,
    x_ptr,
    codes_ptr,
    parameters_ptr,
    bias_ptr,
    norm_ptr,
    ids_ptr,
    num_experts,
    n,
    k,
    height,
    x_stride,
    codes_stride,
    parameters_stride,
    eps,
    offset,
    scale,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
):
    first_row, choice = begin(ids_ptr, num_experts, height, IS_DEPENDENT, HAS_EXPERTS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out_ptr += choice * n
    x_ptr += choice * x_stride
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    rows, up_rows = rows_of_columns(first_row, columns, n, NAME)
    pair = tl.arange(0, BLOCK_N * RUNS)
    own = tl.program_id(0) * BLOCK_N + pair // RUNS
    first, is_own = pair % RUNS, own < n
    own_rows, own_up_rows = rows_of_columns(first_row, own, n, NAME)
    codes = codes_ptr + own_rows * codes_stride
    parameters = parameters_ptr + own_rows * parameters_stride
    up_codes = codes_ptr + own_up_rows * codes_stride
    up_parameters = parameters_ptr + own_up_rows * parameters_stride
    low = _half_tile(codes, parameters, first, is_own, k, 0, PACKING, dtype)
    high = _half_tile(codes, parameters, first, is_own, k, 1, PACKING, dtype)
    bias = load_if(HAS_BIAS, bias_ptr + rows, is_column)
    up_bias = load_if(HAS_BIAS and IS_GATED, bias_ptr + up_rows, is_column)
    wait(IS_DEPENDENT, HAS_EXPERTS)

    before = load_if(ADDS, out_ptr + columns, is_column)
    total = tl.zeros((32, BLOCK_N * RUNS), tl.float32)
    up_total = tl.zeros((32, BLOCK_N * RUNS), tl.float32)
    squares = tl.zeros((32, BLOCK_N * RUNS), tl.float32)
    for start in range(0, tl.cdiv(k, 64), RUNS):
        run = start + first
        x_low, square_low = _half_row(x_ptr, norm_ptr, run, k, offset, 0, HAS_NORM)
        x_high, square_high = _half_row(x_ptr, norm_ptr, run, k, offset, 1, HAS_NORM)
        squares += square_low + square_high
        next_low = _half_tile(codes, parameters, run + RUNS, is_own, k, 0, PACKING, dtype)
        next_high = _half_tile(codes, parameters, run + RUNS, is_own, k, 1, PACKING, dtype)
        total += low.to(tl.float32) * x_low + high.to(tl.float32) * x_high
        low, high = next_low, next_high
        if IS_GATED:
            up_low = _half_tile(up_codes, up_parameters, run, is_own, k, 0, PACKING, dtype)
            up_high = _half_tile(up_codes, up_parameters, run, is_own, k, 1, PACKING, dtype)
            up_total += up_low.to(tl.float32) * x_low + up_high.to(tl.float32) * x_high
    factor = 1.0
    if HAS_NORM:  # the pairs of each column have all elements of the row
        factor = tl.rsqrt(_by_column(squares, BLOCK_N, RUNS) / k + eps)
    product = _by_column(total, BLOCK_N, RUNS) * factor
    up_product = product
    if IS_GATED:
        up_product = _by_column(up_total, BLOCK_N, RUNS) * factor
    result = finished(
        product, up_product, bias, up_bias, before, scale, dtype, NAME, IS_GATED, ADDS, HAS_EXPERTS
    )
    tl.store(out_ptr + columns, result.to(dtype), mask=is_column)


def multiply_row_packed(
    out: Tensor,
    x: Tensor,
    weight: PackedRows,
    bias: Tensor | None = None,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    adds: bool = False,
    scale: float = 1.0,
    is_dependent: bool = False,
) -> None:
    """Computes what `single_row.multiply_row` computes, from a packed matrix.

    Args:
        out: [1, n], contiguous; not ``x``.
        x: [1, k], contiguous; float32, float16 or bfloat16, as ``out``.
        weight: [n, k], or [2 * n, k] for a gated activation. Its values are rounded to x's dtype.
        bias, norm, activation, adds, scale, is_dependent: see `multiply_row`.

    Reads ``weight`` once: in 4 bits with a float16 for each group of 32, 8,192 x 2,048 weights are
    9.4 MB, 2.2 us at 4.26 TB/s; no measurement has confirmed that.
    """
    (height, k), (_, width) = weight.shape, x.shape
    is_gated = activation is not None and activation.is_gated
    n = height // 2 if is_gated else height
    assert out.shape == (1, n), "out must be [1, n]"
    assert x.shape == (1, k), "x must be one row, as long as those of weight"
    assert out.stride(1) == x.stride(1) == 1, "rows must be contiguous"
    assert out.dtype is x.dtype, "out and x have one dtype"
    assert bias is None or bias.shape == (height,), "bias: one for each row of weight"
    assert norm is None or norm.weight.shape == (k,), "the norm's weight is [k]"
    check_rows(weight)
    if n == 0:
        return
    config = packed_row_config()
    multiply_packed_row[(triton.cdiv(n, config.block_n),)](
        out,
        x,
        *memory_of(weight),
        x if bias is None else bias,
        x if norm is None else norm.weight,
        x,
        1,
        n,
        width,
        height,
        0,
        *strides_of(weight),
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
        scale,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        NAME=None if activation is None else activation.name,
        IS_GATED=is_gated,
        HAS_EXPERTS=False,
        IS_DEPENDENT=is_dependent,
        PACKING=weight.packing,
        BLOCK_N=config.block_n,
        RUNS=config.block_k // RUN,
        num_warps=config.num_warps,
        num_stages=1,
        **FLAGS,
        **({"launch_pdl": True} if is_dependent else {}),
    )
