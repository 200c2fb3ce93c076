"""The kernel of the product of one row with a matrix, which `single_row` launches.

A decode step of one request reads each weight once and computes almost nothing with it. What it
waits for beside its bytes is launches: each begins when the one before has written its last result.
So a launch computes a product and what would be launches of their own: the norm of the row before
it, an activation or the addition to the residual stream behind it.

A program computes a few columns, in tiles of some elements of their rows. A dependent launch (from
compute capability 9.0 on) loads its first tile before it waits for the launch before: weights do
not depend on any launch of a step. In the loop the next tile is loaded before one is used.

Measured on an H200, which copies 4.26 TB/s: a small dependent launch takes 0.6 us, an independent
one 0.8 to 1.1 us. A barrier of all programs of a persistent kernel takes 1.06 us with one program
for each multiprocessor, and 1.9 us with two; `decoder_kernel` says what would make up for that. A
second row in the same program costs about 5 us a launch (its products are not on tensor cores), and
asking the L2 cache for each line of the matrix that is read next costs 4 us: neither is done here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.activation import active, shifted
from shmllm_kernels.gpu.shared_expert import choice_of_part


@triton.jit
def load_if(IS_WANTED: tl.constexpr, places, mask):
    """Returns what lies there, float32, or 0."""
    found = 0.0
    if IS_WANTED:
        found = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def tile_of(places, is_column, begin, k, BLOCK_K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Returns some elements of some rows of a matrix, [BLOCK_N, BLOCK_K]."""
    if IS_WHOLE:
        return tl.load(places + begin)
    else:
        inside = begin + tl.arange(0, BLOCK_K) < k
        return tl.load(places + begin, mask=is_column[:, None] & inside[None, :], other=0.0)


@triton.jit
def elements_of(
    x_ptr, norm_ptr, begin, k, offset,
    HAS_NORM: tl.constexpr, BLOCK_K: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns some elements of the row times those of the norm's weight, and their squares."""
    ks = begin + tl.arange(0, BLOCK_K)
    mask = None if IS_WHOLE else ks < k
    x = tl.load(x_ptr + ks, mask=mask, other=None if IS_WHOLE else 0.0).to(tl.float32)
    squares = x * x
    if HAS_NORM:
        factors = tl.load(norm_ptr + ks, mask=mask, other=None if IS_WHOLE else 0.0)
        x *= factors.to(tl.float32) + offset
    return x, squares


@triton.jit
def _activated(x, NAME: tl.constexpr, dtype: tl.constexpr):
    """Returns the activation of a product, which is rounded before and after it."""
    if NAME is not None:
        x = active(x.to(dtype).to(tl.float32), NAME).to(dtype).to(tl.float32)
    return x


@triton.jit
def rows_of_columns(first_row, columns, between, NAME: tl.constexpr):
    """Returns the rows of a matrix for some columns, and those of their second halves, so many rows
    behind them."""
    if NAME == "gpt_oss":
        rows = first_row + 2 * columns
        up_rows = rows + 1
    else:
        rows = first_row + columns
        up_rows = rows + between
    return rows, up_rows


@triton.jit
def row_of_expert(ids_ptr, choice, num_experts, height):
    """Returns the first row of the matrix of a chosen expert, int64. Of a padded token the choice
    may be anything; what does not exist stands for the first one."""
    expert = tl.load(ids_ptr + choice)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, 0)
    return expert.to(tl.int64) * height


@triton.jit
def begin(
    ids_ptr, num_experts, height, IS_DEPENDENT: tl.constexpr, HAS_EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    """Returns the first row of the matrix that a program multiplies with, and its number: those of
    the expert that was chosen for it, which the launch before may have done, or 0. Behind the
    choices is a shared expert."""
    choice = tl.program_id(0) * 0
    first_row = choice.to(tl.int64)
    if IS_DEPENDENT:
        gdc_launch_dependents()
    if HAS_EXPERTS:
        if IS_DEPENDENT:
            gdc_wait()
        choice = tl.program_id(1)
        first_row = row_of_expert(ids_ptr, tl.minimum(choice, CHOICES - 1), num_experts, height)
    return first_row, choice


@triton.jit
def wait(IS_DEPENDENT: tl.constexpr, HAS_EXPERTS: tl.constexpr):
    """Waits for the launch before, unless `begin` has."""
    if IS_DEPENDENT and not HAS_EXPERTS:
        gdc_wait()


@triton.jit
def finished(
    product, up_product, bias, up_bias, before, scale, dtype: tl.constexpr,
    NAME: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr, HAS_EXPERTS: tl.constexpr,
):  # fmt: skip
    """Returns what a launch stores of its products."""
    product += bias
    up_product += up_bias
    if HAS_EXPERTS:
        product = _of_expert(product, up_product, NAME, IS_GATED)
    else:
        product = _activated(product, NAME, dtype)
        if IS_GATED:
            product *= up_product.to(dtype).to(tl.float32)
    if ADDS:
        product = product.to(dtype).to(tl.float32) * scale + before
    return product


@triton.jit
def _of_expert(product, up_product, NAME: tl.constexpr, IS_GATED: tl.constexpr):
    """Returns the activation of an expert, which rounds nothing before its result."""
    if NAME == "gpt_oss":
        product = shifted(product, up_product, 7.0)
    elif NAME is not None:
        product = active(product, NAME)
        if IS_GATED:
            product *= up_product
    return product


@triton.jit
def load_factors(factors_ptr, places, mask):
    """Returns what a launch multiplies its activation by, float32, if there is anything."""
    factors = 1.0
    if factors_ptr is not None:
        factors = tl.load(factors_ptr + places, mask=mask, other=0.0).to(tl.float32)
    return factors


@triton.jit
def load_gate_factor(gate_factors_ptr, choice, CHOICES: tl.constexpr):
    """Returns what the gate of a choice is multiplied by, if there is anything; that of a part of a
    shared expert stays."""
    factor = 1.0
    if gate_factors_ptr is not None:
        factor = tl.load(gate_factors_ptr + choice, mask=choice < CHOICES, other=1.0)
    return factor


@triton.jit
def multiplied(result, factors_ptr, factors, dtype: tl.constexpr):
    """Returns a result, which is rounded before, times its factors, if there are any."""
    if factors_ptr is not None:
        result = result.to(dtype).to(tl.float32) * factors
    return result


@triton.jit
def multiply_single_row(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    ids_ptr,
    factors_ptr,
    num_experts,
    n,
    k,
    height,
    weight_stride,
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
    IS_WHOLE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_row, choice = begin(ids_ptr, num_experts, height, IS_DEPENDENT, HAS_EXPERTS, CHOICES)
    weight_ptr, _, first_row, between = choice_of_part(
        choice, first_row, n, weight_ptr, weight_ptr, shared, CHOICES
    )
    dtype = out_ptr.dtype.element_ty
    out_ptr += choice * n
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < n
    rows, up_rows = rows_of_columns(first_row, columns, between, NAME)
    inner = tl.arange(0, BLOCK_K)[None, :]
    places = weight_ptr + rows[:, None] * weight_stride + inner
    # An activation without a gate has no second half, which then stands for the first one.
    second = weight_ptr + (up_rows if IS_GATED else rows)[:, None] * weight_stride + inner
    weight = tile_of(places, is_column, 0, k, BLOCK_K, IS_WHOLE)
    up = weight
    if IS_GATED:
        up = tile_of(second, is_column, 0, k, BLOCK_K, IS_WHOLE)
    bias = load_if(HAS_BIAS, bias_ptr + rows, is_column)
    up_bias = load_if(HAS_BIAS and IS_GATED, bias_ptr + up_rows, is_column)
    wait(IS_DEPENDENT, HAS_EXPERTS)

    before = load_if(ADDS, out_ptr + columns, is_column)
    factors = load_factors(factors_ptr, columns, is_column)
    gate_factor = load_gate_factor(gate_factors_ptr, choice, CHOICES)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(BLOCK_K, k, BLOCK_K):
        next_weight = tile_of(places, is_column, start, k, BLOCK_K, IS_WHOLE)
        if IS_GATED:
            next_up = tile_of(second, is_column, start, k, BLOCK_K, IS_WHOLE)
        x, square = elements_of(
            x_ptr, norm_ptr, start - BLOCK_K, k, offset, HAS_NORM, BLOCK_K, IS_WHOLE
        )
        squares += square
        total += weight.to(tl.float32) * x[None, :]
        weight = next_weight
        if IS_GATED:
            up_total += up.to(tl.float32) * x[None, :]
            up = next_up
    last = (k - 1) // BLOCK_K * BLOCK_K
    x, square = elements_of(x_ptr, norm_ptr, last, k, offset, HAS_NORM, BLOCK_K, IS_WHOLE)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares + square, axis=0) / k + eps)
    product = tl.sum(total + weight.to(tl.float32) * x[None, :], axis=1) * factor
    up_product = product
    if IS_GATED:
        up_product = tl.sum(up_total + up.to(tl.float32) * x[None, :], axis=1) * factor
    if gate_factors_ptr is not None:
        product *= gate_factor
    result = finished(
        product, up_product, bias, up_bias, before, scale, dtype, NAME, IS_GATED, ADDS, HAS_EXPERTS
    )
    result = multiplied(result, factors_ptr, factors, dtype)
    tl.store(out_ptr + columns, result.to(dtype), mask=is_column)
