"""The kernels of the products of tokens with the weights of their experts; `experts` launches them.

A program computes a block of pairs and a tile of columns. The first ones compute the parts of a
shared expert, if there is one; those without a block return.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.activation import active, bounded, shifted
from shmllm_kernels.gpu.expert_lora import add_to_block
from shmllm_kernels.gpu.pairs import block_of
from shmllm_kernels.gpu.products import multiply
from shmllm_kernels.gpu.shared_expert import block_of_part, matrix_of_part


@triton.jit
def _activated(gate, up, bound, NAME: tl.constexpr):
    """Returns the activation of gates times their factors, float32; see `reference.moe.experts`."""
    if NAME == "silu_bounded":
        opened, up = bounded(active(gate, "silu"), up, bound)
        value = opened * up
    elif NAME == "silu_clamped":
        gate, up = bounded(gate, up, bound)
        value = active(gate, "silu") * up
    elif NAME == "silu_shifted":
        value = shifted(gate, up, bound)
    elif NAME == "gpt_oss":
        value = shifted(gate, up, 7.0)
    else:
        value = active(gate, NAME) * up
    return value


@triton.jit
def multiply_gate_and_up(
    out_ptr,
    x_ptr,
    pairs_ptr,
    blocks_ptr,
    num_blocks_ptr,
    weight_ptr,
    parameters_ptr,
    bias_ptr,
    x_stride,
    inner,
    k,
    weight_stride,
    parameters_stride,
    adapters,
    shared,
    gate_factors_ptr,
    bound,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    NAME: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PACKING: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # behind the wait: `multiply_down` reads the blocks before its own
    part = tl.program_id(0)
    index = tl.maximum(part - PARTS, 0)
    num_blocks = tl.load(num_blocks_ptr)
    expert, pairs, rows, is_row = block_of(index, blocks_ptr, pairs_ptr, BLOCK_M)
    if part >= num_blocks + PARTS:
        return
    tokens, is_pair = pairs // TOP_K, is_row & (part >= PARTS)
    # Columns of gate and up in turn, so that the tile splits into both.
    halves = tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * (BLOCK_N // 2) + halves // 2
    is_up = halves % 2
    weight_columns = columns + is_up * inner if NAME != "gpt_oss" else 2 * columns + is_up
    places = expert * (2 * inner) + weight_columns
    is_column = columns < inner
    if PARTS > 0:
        is_part = part < PARTS
        tokens, rows, is_row = block_of_part(
            is_part, part, tokens, rows, is_row, shared.num_tokens, BLOCK_M, TOP_K
        )
        of_part = part * inner + columns + is_up * (PARTS * inner)
        places = tl.where(is_part, of_part.to(tl.int64), places)
        weight_ptr, parameters_ptr, weight_stride, parameters_stride = matrix_of_part(
            is_part, part, weight_ptr, parameters_ptr, weight_stride, parameters_stride, shared
        )
    x_rows = x_ptr + tokens.to(tl.int64) * x_stride
    both = multiply(
        x_rows, is_row, weight_ptr, parameters_ptr, places, is_column,
        k, weight_stride, parameters_stride, PACKING, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        both += tl.load(bias_ptr + places, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if adapters is not None:
        both = add_to_block(
            both, adapters, expert, pairs, rows, is_row, weight_columns, is_column, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
    gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N // 2, 2)))
    if gate_factors_ptr is not None:
        gate *= tl.load(gate_factors_ptr + pairs, mask=is_pair, other=1.0)[:, None]
    value = _activated(gate, up, bound, NAME)
    columns = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    targets = out_ptr + rows.to(tl.int64)[:, None] * inner + columns[None, :]
    mask = is_row[:, None] & (columns < inner)[None, :]
    tl.store(targets, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def multiply_up(
    out_ptr,
    x_ptr,
    pairs_ptr,
    blocks_ptr,
    num_blocks_ptr,
    weight_ptr,
    parameters_ptr,
    bias_ptr,
    x_stride,
    inner,
    k,
    weight_stride,
    parameters_stride,
    adapters,
    shared,
    gate_factors_ptr,
    bound,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    NAME: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PACKING: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # behind the wait: `multiply_down` reads the blocks before its own
    part = tl.program_id(0)
    index = tl.maximum(part - PARTS, 0)
    num_blocks = tl.load(num_blocks_ptr)
    expert, pairs, rows, is_row = block_of(index, blocks_ptr, pairs_ptr, BLOCK_M)
    if part >= num_blocks + PARTS:
        return
    tokens = pairs // TOP_K
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < inner
    places = expert * inner + columns
    if PARTS > 0:
        is_part = part < PARTS
        tokens, rows, is_row = block_of_part(
            is_part, part, tokens, rows, is_row, shared.num_tokens, BLOCK_M, TOP_K
        )
        places = tl.where(is_part, (part * inner + columns).to(tl.int64), places)
        weight_ptr, parameters_ptr, weight_stride, parameters_stride = matrix_of_part(
            is_part, part, weight_ptr, parameters_ptr, weight_stride, parameters_stride, shared
        )
    x_rows = x_ptr + tokens.to(tl.int64) * x_stride
    value = multiply(
        x_rows, is_row, weight_ptr, parameters_ptr, places, is_column,
        k, weight_stride, parameters_stride, PACKING, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        value += tl.load(bias_ptr + places, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if adapters is not None:
        value = add_to_block(
            value, adapters, expert, pairs, rows, is_row, columns, is_column, BLOCK_M, BLOCK_N
        )  # fmt: skip
    value = active(value, NAME)
    targets = out_ptr + rows.to(tl.int64)[:, None] * inner + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(targets, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def multiply_down(
    out_ptr,
    x_ptr,
    pairs_ptr,
    blocks_ptr,
    num_blocks_ptr,
    weight_ptr,
    parameters_ptr,
    bias_ptr,
    num_columns,
    k,
    weight_stride,
    parameters_stride,
    adapters,
    shared,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PACKING: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
    part = tl.program_id(0)
    index = tl.maximum(part - PARTS, 0)
    num_blocks = tl.load(num_blocks_ptr)
    expert, pairs, rows, is_row = block_of(index, blocks_ptr, pairs_ptr, BLOCK_M)
    if IS_DEPENDENT:
        gdc_wait()
    if part >= num_blocks + PARTS:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_columns
    places = expert * num_columns + columns
    if PARTS > 0:
        is_part = part < PARTS
        _, rows, is_row = block_of_part(
            is_part, part, pairs, rows, is_row, shared.num_tokens, BLOCK_M, TOP_K
        )
        pairs = tl.where(is_part, rows, pairs)
        places = tl.where(is_part, columns.to(tl.int64), places)
        weight_ptr, parameters_ptr, weight_stride, parameters_stride = matrix_of_part(
            is_part, part, weight_ptr, parameters_ptr, weight_stride, parameters_stride, shared
        )
    x_rows = x_ptr + rows.to(tl.int64) * k
    result = multiply(
        x_rows, is_row, weight_ptr, parameters_ptr, places, is_column,
        k, weight_stride, parameters_stride, PACKING, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        result += tl.load(bias_ptr + places, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if adapters is not None:
        result = add_to_block(
            result, adapters, expert, pairs, rows, is_row, columns, is_column, BLOCK_M, BLOCK_N
        )  # fmt: skip
    targets = out_ptr + pairs.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(targets, result.to(out_ptr.dtype.element_ty), mask=mask)
