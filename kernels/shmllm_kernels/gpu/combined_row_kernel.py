"""The kernels of the last products of one token's experts with their sum; `combined_row` launches
them.

A program owns some columns of the sum, and multiplies with the rows of each chosen expert for them,
in the order of the choices. So no program waits for another one, and no product goes through
memory. It loads the first tile of an expert before it uses the last one of the expert before.
Products are rounded as `single_row_kernel` and `packed_row_kernel` store them, and added as
`expert_sums.combine` adds them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.expert_sums import load_addends, store_sum
from shmllm_kernels.gpu.packed_row_kernel import by_column, half_row, half_tile
from shmllm_kernels.gpu.single_row_kernel import elements_of, row_of_expert, tile_of


@triton.jit
def _begin(IS_DEPENDENT: tl.constexpr):
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _weighted(product, bias_ptr, rows, weight, is_column, dtype: tl.constexpr):
    """Returns what an expert adds to the sum: its product, which is rounded, times its weight."""
    if bias_ptr is not None:
        product += tl.load(bias_ptr + rows, mask=is_column, other=0.0).to(tl.float32)
    return weight * product.to(dtype).to(tl.float32)


@triton.jit
def combine_single_row(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    gates_ptr,
    num_experts,
    n,
    k,
    weight_stride,
    scale,
    ADDS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    _begin(IS_DEPENDENT)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    inner = tl.arange(0, BLOCK_K)[None, :]
    rows = row_of_expert(ids_ptr, 0, num_experts, n) + columns
    weight = tile_of(
        weight_ptr + rows[:, None] * weight_stride + inner, is_column, 0, k, BLOCK_K, IS_WHOLE
    )
    shared, before = load_addends(
        out_ptr + columns, shared_ptr, gates_ptr, 0, 0, 0, columns, is_column, ADDS
    )
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in range(TOP_K):
        factor = tl.load(weights_ptr + choice)
        own_x = x_ptr + choice * k
        places = weight_ptr + rows[:, None] * weight_stride + inner
        products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(BLOCK_K, k, BLOCK_K):
            next_weight = tile_of(places, is_column, start, k, BLOCK_K, IS_WHOLE)
            x, _ = elements_of(own_x, own_x, start - BLOCK_K, k, 0.0, False, BLOCK_K, IS_WHOLE)
            products += weight.to(tl.float32) * x[None, :]
            weight = next_weight
        following = tl.minimum(choice + 1, TOP_K - 1)
        next_rows = row_of_expert(ids_ptr, following, num_experts, n) + columns
        next_places = weight_ptr + next_rows[:, None] * weight_stride + inner
        has_next = is_column & (choice < following)
        next_weight = tile_of(next_places, has_next, 0, k, BLOCK_K, False)
        last = (k - 1) // BLOCK_K * BLOCK_K
        x, _ = elements_of(own_x, own_x, last, k, 0.0, False, BLOCK_K, IS_WHOLE)
        product = tl.sum(products + weight.to(tl.float32) * x[None, :], axis=1)
        total += _weighted(product, bias_ptr, rows, factor, is_column, out_ptr.dtype.element_ty)
        weight, rows = next_weight, next_rows
    store_sum(out_ptr + columns, total, shared, before, scale, is_column, ADDS)


@triton.jit
def combine_packed_row(
    out_ptr,
    x_ptr,
    codes_ptr,
    parameters_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    gates_ptr,
    num_experts,
    n,
    k,
    codes_stride,
    parameters_stride,
    scale,
    ADDS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
):
    _begin(IS_DEPENDENT)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    pair = tl.arange(0, BLOCK_N * RUNS)
    own, first = tl.program_id(0) * BLOCK_N + pair // RUNS, pair % RUNS
    is_own = own < n
    first_row = row_of_expert(ids_ptr, 0, num_experts, n)
    codes = codes_ptr + (first_row + own) * codes_stride
    parameters = parameters_ptr + (first_row + own) * parameters_stride
    low = half_tile(codes, parameters, first, is_own, k, 0, PACKING, dtype)
    high = half_tile(codes, parameters, first, is_own, k, 1, PACKING, dtype)
    shared, before = load_addends(
        out_ptr + columns, shared_ptr, gates_ptr, 0, 0, 0, columns, is_column, ADDS
    )
    total = tl.zeros((BLOCK_N,), tl.float32)
    last = (tl.cdiv(k, 64) - 1) // RUNS * RUNS
    for choice in range(TOP_K):
        factor = tl.load(weights_ptr + choice)
        own_x = x_ptr + choice * k
        products = tl.zeros((32, BLOCK_N * RUNS), tl.float32)
        for start in range(0, last, RUNS):
            run = start + first
            x_low, _ = half_row(own_x, own_x, run, k, 0.0, 0, False)
            x_high, _ = half_row(own_x, own_x, run, k, 0.0, 1, False)
            next_low = half_tile(codes, parameters, run + RUNS, is_own, k, 0, PACKING, dtype)
            next_high = half_tile(codes, parameters, run + RUNS, is_own, k, 1, PACKING, dtype)
            products += low.to(tl.float32) * x_low + high.to(tl.float32) * x_high
            low, high = next_low, next_high
        x_low, _ = half_row(own_x, own_x, last + first, k, 0.0, 0, False)
        x_high, _ = half_row(own_x, own_x, last + first, k, 0.0, 1, False)
        following = tl.minimum(choice + 1, TOP_K - 1)
        next_row = row_of_expert(ids_ptr, following, num_experts, n)
        codes = codes_ptr + (next_row + own) * codes_stride
        parameters = parameters_ptr + (next_row + own) * parameters_stride
        has_next = is_own & (choice < following)
        next_low = half_tile(codes, parameters, first, has_next, k, 0, PACKING, dtype)
        next_high = half_tile(codes, parameters, first, has_next, k, 1, PACKING, dtype)
        products += low.to(tl.float32) * x_low + high.to(tl.float32) * x_high
        product, rows = by_column(products, BLOCK_N, RUNS), first_row + columns
        total += _weighted(product, bias_ptr, rows, factor, is_column, dtype)
        low, high, first_row = next_low, next_high, next_row
    store_sum(out_ptr + columns, total, shared, before, scale, is_column, ADDS)
