"""Products of tokens with the weights of their experts, all experts in one launch.

`pairs.sort_pairs` lays the pairs of a token and an expert out in blocks, each of one expert. A
program computes a block and a tile of columns; the grid has room for the most blocks that these
tokens can make, and programs without a block return. So a captured graph serves every choice of
experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.activation import active
from shmllm_kernels.gpu.configs import ProductConfig
from shmllm_kernels.gpu.expert_lora import PairAdapters, add_to_block, operands_of
from shmllm_kernels.gpu.functions import sigmoid
from shmllm_kernels.gpu.packings import Rows
from shmllm_kernels.gpu.pairs import SortedPairs, block_of, max_blocks
from shmllm_kernels.gpu.products import check_rows, memory_of, multiply, options, strides_of

ACTIVATIONS = ("silu", "gelu_tanh", "gpt_oss", "relu_squared")


@triton.jit
def _gate_and_up(
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
    TOP_K: tl.constexpr,
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
        gdc_launch_dependents()  # behind the wait: `_down` reads the blocks before its own
    index = tl.program_id(0)
    num_blocks = tl.load(num_blocks_ptr)
    expert, pairs, rows, is_row = block_of(index, blocks_ptr, pairs_ptr, BLOCK_M)
    if index >= num_blocks:
        return
    tokens = pairs // TOP_K
    # Columns of gate and up in turn, so that the tile splits into both.
    halves = tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * (BLOCK_N // 2) + halves // 2
    is_up = halves % 2
    weight_columns = columns + is_up * inner if NAME != "gpt_oss" else 2 * columns + is_up
    places = expert * (2 * inner) + weight_columns
    is_column = columns < inner
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
    if NAME != "gpt_oss":
        value = active(gate, NAME) * up
    else:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        value = gate * sigmoid(1.702 * gate) * (up + 1.0)
    columns = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    targets = out_ptr + rows.to(tl.int64)[:, None] * inner + columns[None, :]
    mask = is_row[:, None] & (columns < inner)[None, :]
    tl.store(targets, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _up(
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
    TOP_K: tl.constexpr,
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
        gdc_launch_dependents()  # behind the wait: `_down` reads the blocks before its own
    index = tl.program_id(0)
    num_blocks = tl.load(num_blocks_ptr)
    expert, pairs, rows, is_row = block_of(index, blocks_ptr, pairs_ptr, BLOCK_M)
    if index >= num_blocks:
        return
    tokens = pairs // TOP_K
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < inner
    places = expert * inner + columns
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
def _down(
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
    index = tl.program_id(0)
    num_blocks = tl.load(num_blocks_ptr)
    expert, pairs, rows, is_row = block_of(index, blocks_ptr, pairs_ptr, BLOCK_M)
    if IS_DEPENDENT:
        gdc_wait()
    if index >= num_blocks:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_columns
    places = expert * num_columns + columns
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


def gate_and_up(
    out: Tensor,
    x: Tensor,
    weight: Rows,
    bias: Tensor | None,
    activation: str,
    top_k: int,
    pairs: SortedPairs,
    config: ProductConfig,
    adapters: PairAdapters | None = None,
    is_dependent: bool = False,
) -> None:
    """Writes the activation of each pair's product with gate and up of its expert, or, for
    "relu_squared", with up alone.

    The products are float32 up to the activation's result, which is rounded once.

    Args:
        out: [pairs, inner] contiguous, in the order of the sorted pairs; all pairs of the tokens.
        x: [tokens, k], each row contiguous, out's dtype.
        weight: [experts, 2 * inner, k], or [experts, inner, k] without gates, contiguous, out's
            dtype; or packed, and the values are rounded to out's dtype.
        bias: [experts, rows of the weights] contiguous, out's dtype, or None.
        activation: one of ACTIVATIONS; see `reference.moe.experts`.
        top_k: the number of experts of each token.
        pairs: the sorted pairs, in blocks of ``config.block_m``.
        config: the tile sizes, from `configs.product_config`, or `configs.packed_config`.
        adapters: what is added to gate and up before the activation, or None.
        is_dependent: whether the launch may begin before the launch before it has ended, and the
            next one before this one has; see `down`. The GPU must have compute capability 9.0.

    One launch a layer. It reads the weights of the chosen experts once for each block: with 8 of
    128 experts of 2 * 768 x 2048 in bfloat16, 50 MB for one token, 12 us at 4.3 TB/s; 805 MB, 190
    us, if all experts are chosen. 8,192 tokens have 0.41 Tflop: 0.7 ms at 600 TFLOP/s.
    """
    num_experts, width, k = weight.shape
    num_pairs, is_gated = len(x) * top_k, activation != "relu_squared"
    inner = width // 2 if is_gated else width
    assert out.shape == (num_pairs, inner), "out: a row for each pair, as wide as the activation"
    assert activation in ACTIVATIONS, f"no activation {activation!r}"
    _check(out, x, weight, bias)
    if num_pairs == 0:
        return
    columns_at_once = config.block_n // 2 if is_gated else config.block_n
    grid = _grid(num_pairs, num_experts, inner, columns_at_once, config.block_m)
    (_gate_and_up if is_gated else _up)[grid](
        out,
        x,
        pairs.pairs,
        pairs.blocks,
        pairs.num_blocks,
        *memory_of(weight),
        x if bias is None else bias,
        x.stride(0),
        inner,
        k,
        *strides_of(weight),
        operands_of(adapters, x.dtype),
        TOP_K=top_k,
        NAME=activation,
        HAS_BIAS=bias is not None,
        IS_DEPENDENT=is_dependent,
        **options(weight, config),
        **({"launch_pdl": True} if is_dependent else {}),
    )


def down(
    out: Tensor,
    x: Tensor,
    weight: Rows,
    bias: Tensor | None,
    pairs: SortedPairs,
    config: ProductConfig,
    adapters: PairAdapters | None = None,
    is_dependent: bool = False,
) -> None:
    """Writes each pair's product with the last projection of its expert.

    Args:
        out: [pairs, columns] contiguous, in the order of the pairs themselves.
        x: [pairs, k] contiguous, out's dtype, in the order of the sorted pairs.
        weight: [experts, columns, k], as in `gate_and_up`.
        bias: [experts, columns] contiguous, out's dtype, or None.
        pairs: as in `gate_and_up`. Rows of ``out`` whose pair is not among them stay unchanged.
        config: as in `gate_and_up`.
        adapters: what is added, or None.
        is_dependent: whether the launch may begin before the launch before it has ended. It reads
            the blocks then, and waits. So the launch before must have begun after ``pairs`` were
            complete. The GPU must have compute capability 9.0.

    One launch a layer, half the bytes and operations of `gate_and_up`. Where it is dependent, the
    0.8 us until it starts and the 0.6 us for its blocks pass while `gate_and_up` ends.
    """
    num_experts, columns, k = weight.shape
    assert x.shape == (len(out), k), "x: a row for each pair"
    assert out.shape[1:] == (columns,), "out has as many columns as the weights rows"
    _check(out, x, weight, bias)
    if len(out) == 0:
        return
    _down[_grid(len(out), num_experts, columns, config.block_n, config.block_m)](
        out,
        x,
        pairs.pairs,
        pairs.blocks,
        pairs.num_blocks,
        *memory_of(weight),
        x if bias is None else bias,
        columns,
        k,
        *strides_of(weight),
        operands_of(adapters, x.dtype),
        HAS_BIAS=bias is not None,
        IS_DEPENDENT=is_dependent,
        **options(weight, config),
        **({"launch_pdl": True} if is_dependent else {}),
    )


def _grid(
    num_pairs: int, num_experts: int, columns: int, columns_at_once: int, block_m: int
) -> tuple[int, int]:
    """The blocks of one expert follow one another, so that they read the same tile of weights."""
    blocks = max_blocks(num_pairs, num_experts, block_m)
    return blocks, triton.cdiv(columns, columns_at_once)


def _check(out: Tensor, x: Tensor, weight: Rows, bias: Tensor | None) -> None:
    assert out.is_contiguous(), "out must be contiguous"
    assert x.stride(1) == 1, "rows must be contiguous"
    check_rows(weight)
    dtypes = {out.dtype, x.dtype, *([weight.dtype] if isinstance(weight, Tensor) else [])}
    assert len(dtypes) == 1, "out, x and weights have one dtype"
    assert bias is None or bias.shape == weight.shape[:2], "bias: one for each row of the weights"
    assert bias is None or bias.is_contiguous(), "bias must be contiguous"
