"""The kernels of the last products of one token's experts with their sum; `combined_row` launches
them.

A program owns some columns of the sum, and multiplies with the rows of each chosen expert for them,
in the order of the choices. So no program waits for another one, and no product goes through
memory. It loads the first tile of an expert before it uses the last one of the expert before.
Products are rounded as `single_row_kernel` and `packed_row_kernel` store them, and added as
`expert_sums.combine` adds them. The parts of a shared expert are behind the choices.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.expert_sums import gate_of, load_addends, store_sum
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
def _factor(weights_ptr, choice, gate, TOP_K: tl.constexpr):
    """Returns the weight of a choice, or, behind the experts, the factor of the shared one."""
    weight = tl.load(weights_ptr + tl.minimum(choice, TOP_K - 1))
    return tl.where(choice < TOP_K, weight, gate)


@triton.jit
def _first_row(ids_ptr, choice, num_experts, n, TOP_K: tl.constexpr):
    """Returns the first row of a choice's expert, int64; behind the experts, that of any."""
    return row_of_expert(ids_ptr, tl.minimum(choice, TOP_K - 1), num_experts, n)


@triton.jit
def _own_rows(
    choice, rows, columns, weight_ptr, parameters_ptr, stride, parameters_stride, shared_rows,
    TOP_K: tl.constexpr,
):  # fmt: skip
    """Returns the addresses of some rows of a choice's matrix and of their parameters.

    Args:
        choice: which one; behind the experts are the parts of the shared one.
        rows: the rows if it is an expert.
        columns: the columns of the sum that they belong to.
    """
    weight = weight_ptr + rows * stride
    parameters = parameters_ptr + rows * parameters_stride
    if shared_rows is not None:
        part, is_part, wide = choice - TOP_K, choice >= TOP_K, columns.to(tl.int64)
        of_part = shared_rows.weight + part * shared_rows.part_stride
        weight = tl.where(is_part, of_part + wide * shared_rows.stride, weight)
        of_part = shared_rows.parameters + part * shared_rows.parameters_part_stride
        parameters = tl.where(is_part, of_part + wide * shared_rows.parameters_stride, parameters)
    return weight, parameters


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
    shared_rows,
    ADDS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
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
    places = weight_ptr + rows[:, None] * weight_stride + inner
    weight = tile_of(places, is_column, 0, k, BLOCK_K, IS_WHOLE)
    shared, before = load_addends(
        out_ptr + columns, shared_ptr, gates_ptr, 0, 0, 0, columns, is_column, ADDS
    )
    total = tl.zeros((BLOCK_N,), tl.float32)
    gate = gate_of(gates_ptr, 0)
    for choice in range(TOP_K + PARTS):
        factor = _factor(weights_ptr, choice, gate, TOP_K)
        own_x = x_ptr + choice * k
        products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(BLOCK_K, k, BLOCK_K):
            next_weight = tile_of(places, is_column, start, k, BLOCK_K, IS_WHOLE)
            x, _ = elements_of(own_x, own_x, start - BLOCK_K, k, 0.0, False, BLOCK_K, IS_WHOLE)
            products += weight.to(tl.float32) * x[None, :]
            weight = next_weight
        following = tl.minimum(choice + 1, TOP_K + PARTS - 1)
        next_rows = _first_row(ids_ptr, following, num_experts, n, TOP_K) + columns
        followers = _own_rows(
            following, next_rows, columns, weight_ptr, weight_ptr, weight_stride, 0, shared_rows,
            TOP_K,
        )  # fmt: skip
        next_places = followers[0][:, None] + inner
        has_next = is_column & (choice < following)
        next_weight = tile_of(next_places, has_next, 0, k, BLOCK_K, False)
        last = (k - 1) // BLOCK_K * BLOCK_K
        x, _ = elements_of(own_x, own_x, last, k, 0.0, False, BLOCK_K, IS_WHOLE)
        product = tl.sum(products + weight.to(tl.float32) * x[None, :], axis=1)
        total += _weighted(product, bias_ptr, rows, factor, is_column, out_ptr.dtype.element_ty)
        weight, rows, places = next_weight, next_rows, next_places
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
    shared_rows,
    ADDS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
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
    gate = gate_of(gates_ptr, 0)
    for choice in range(TOP_K + PARTS):
        factor = _factor(weights_ptr, choice, gate, TOP_K)
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
        following = tl.minimum(choice + 1, TOP_K + PARTS - 1)
        next_row = _first_row(ids_ptr, following, num_experts, n, TOP_K)
        codes, parameters = _own_rows(
            following, next_row + own, own, codes_ptr, parameters_ptr, codes_stride,
            parameters_stride, shared_rows, TOP_K,
        )  # fmt: skip
        has_next = is_own & (choice < following)
        next_low = half_tile(codes, parameters, first, has_next, k, 0, PACKING, dtype)
        next_high = half_tile(codes, parameters, first, has_next, k, 1, PACKING, dtype)
        products += low.to(tl.float32) * x_low + high.to(tl.float32) * x_high
        product, rows = by_column(products, BLOCK_N, RUNS), first_row + columns
        total += _weighted(product, bias_ptr, rows, factor, is_column, dtype)
        low, high, first_row = next_low, next_high, next_row
    store_sum(out_ptr + columns, total, shared, before, scale, is_column, ADDS)
