"""The kernel of the product of one row with a packed matrix, which `single_row` launches.

It is `single_row_kernel` for weights that `unpacking` reads. A program computes a few columns, and
in each iteration some runs of their rows: every pair of a column and a run is unpacked by itself,
into [32, pairs] values of each half. They are rounded to the row's dtype, as in products of more
rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.shared_expert import choice_of_part
from shmllm_kernels.gpu.single_row_kernel import (
    begin,
    finished,
    load_factors,
    load_gate_factor,
    load_if,
    multiplied,
    rows_of_columns,
    wait,
)
from shmllm_kernels.gpu.unpacking import half_run


@triton.jit
def half_tile(
    code_rows, parameter_rows, run, is_column, k, HALF: tl.constexpr, PACKING: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Returns a half of each pair's run, [32, pairs] in the row's dtype."""
    is_there = is_column & (run * 64 < k)
    return half_run(code_rows, parameter_rows, run, is_there, k, HALF, PACKING).to(dtype)


@triton.jit
def half_row(x_ptr, norm_ptr, run, k, offset, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Returns the row's elements beside half a run of each pair, times those of the norm's weight,
    and their squares, [32, pairs] float32."""
    ks = (run * 64)[None, :] + HALF * 32 + tl.arange(0, 32)[:, None]
    x = tl.load(x_ptr + ks, mask=ks < k, other=0.0).to(tl.float32)
    squares = x * x
    if HAS_NORM:
        x *= tl.load(norm_ptr + ks, mask=ks < k, other=0.0).to(tl.float32) + offset
    return x, squares


@triton.jit
def by_column(of_pairs, BLOCK_N: tl.constexpr, RUNS: tl.constexpr):
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
    factors_ptr,
    num_experts,
    n,
    k,
    height,
    codes_stride,
    parameters_stride,
    eps,
    offset,
    scale,
    shared,
    gate_factors_ptr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
):
    first_row, choice = begin(ids_ptr, num_experts, height, IS_DEPENDENT, HAS_EXPERTS, CHOICES)
    codes_ptr, parameters_ptr, first_row, between = choice_of_part(
        choice, first_row, n, codes_ptr, parameters_ptr, shared, CHOICES
    )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out_ptr += choice * n
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    rows, up_rows = rows_of_columns(first_row, columns, between, NAME)
    pair = tl.arange(0, BLOCK_N * RUNS)
    own = tl.program_id(0) * BLOCK_N + pair // RUNS
    first, is_own = pair % RUNS, own < n
    own_rows, own_up_rows = rows_of_columns(first_row, own, between, NAME)
    codes = codes_ptr + own_rows * codes_stride
    parameters = parameters_ptr + own_rows * parameters_stride
    up_codes = codes_ptr + own_up_rows * codes_stride
    up_parameters = parameters_ptr + own_up_rows * parameters_stride
    low = half_tile(codes, parameters, first, is_own, k, 0, PACKING, dtype)
    high = half_tile(codes, parameters, first, is_own, k, 1, PACKING, dtype)
    bias = load_if(HAS_BIAS, bias_ptr + rows, is_column)
    up_bias = load_if(HAS_BIAS and IS_GATED, bias_ptr + up_rows, is_column)
    wait(IS_DEPENDENT, HAS_EXPERTS)

    before = load_if(ADDS, out_ptr + columns, is_column)
    factors = load_factors(factors_ptr, columns, is_column)
    gate_factor = load_gate_factor(gate_factors_ptr, choice, CHOICES)
    total = tl.zeros((32, BLOCK_N * RUNS), tl.float32)
    up_total = tl.zeros((32, BLOCK_N * RUNS), tl.float32)
    squares = tl.zeros((32, BLOCK_N * RUNS), tl.float32)
    for start in range(0, tl.cdiv(k, 64), RUNS):
        run = start + first
        x_low, square_low = half_row(x_ptr, norm_ptr, run, k, offset, 0, HAS_NORM)
        x_high, square_high = half_row(x_ptr, norm_ptr, run, k, offset, 1, HAS_NORM)
        squares += square_low + square_high
        next_low = half_tile(codes, parameters, run + RUNS, is_own, k, 0, PACKING, dtype)
        next_high = half_tile(codes, parameters, run + RUNS, is_own, k, 1, PACKING, dtype)
        total += low.to(tl.float32) * x_low + high.to(tl.float32) * x_high
        low, high = next_low, next_high
        if IS_GATED:
            up_low = half_tile(up_codes, up_parameters, run, is_own, k, 0, PACKING, dtype)
            up_high = half_tile(up_codes, up_parameters, run, is_own, k, 1, PACKING, dtype)
            up_total += up_low.to(tl.float32) * x_low + up_high.to(tl.float32) * x_high
    factor = 1.0
    if HAS_NORM:  # the pairs of each column have all elements of the row
        factor = tl.rsqrt(by_column(squares, BLOCK_N, RUNS) / k + eps)
    product = by_column(total, BLOCK_N, RUNS) * factor
    up_product = product
    if IS_GATED:
        up_product = by_column(up_total, BLOCK_N, RUNS) * factor
    if gate_factors_ptr is not None:
        product *= gate_factor
    result = finished(
        product, up_product, bias, up_bias, before, scale, dtype, NAME, IS_GATED, ADDS, HAS_EXPERTS
    )
    result = multiplied(result, factors_ptr, factors, dtype)
    tl.store(out_ptr + columns, result.to(dtype), mask=is_column)
