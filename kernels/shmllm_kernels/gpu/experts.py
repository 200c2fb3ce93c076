"""Products of tokens with the weights of their experts, all experts in one launch.

`pairs.sort_pairs` lays the pairs of a token and an expert out in blocks, each of one expert. A
program computes a block and a tile of columns; the grid has room for the most blocks that these
tokens can make, and programs without a block return. So a captured graph serves every choice of
experts.
"""

from __future__ import annotations

import triton
from torch import Tensor

from shmllm_kernels.gpu.configs import ProductConfig
from shmllm_kernels.gpu.expert_lora import PairAdapters, operands_of
from shmllm_kernels.gpu.experts_kernel import multiply_down, multiply_gate_and_up, multiply_up
from shmllm_kernels.gpu.packings import Rows
from shmllm_kernels.gpu.pairs import SortedPairs, max_blocks
from shmllm_kernels.gpu.products import check_rows, memory_of, options, strides_of
from shmllm_kernels.gpu.row_operands import check_gate_factors
from shmllm_kernels.gpu.shared_expert import (
    SharedExpert,
    parts_of,
    rows_of_down,
    rows_of_gate_and_up,
)

ALONE = ("relu_squared", "gelu")
"""The activations of up alone, without a gate."""
BOUNDED = ("silu_bounded", "silu_clamped", "silu_shifted")
"""Those with a bound."""
ACTIVATIONS = ("silu", *BOUNDED, "gelu_tanh", "gpt_oss", *ALONE)


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
    shared: SharedExpert | None = None,
    gate_factors: Tensor | None = None,
    bound: float = 0.0,
) -> None:
    """Writes the activation of each pair's product with gate and up of its expert, or, for those of
    ALONE, with up alone.

    The products are float32 up to the activation's result, which is rounded once.

    Args:
        out: [pairs, inner] contiguous, in the order of the sorted pairs; all pairs of the tokens.
            Behind these, [parts, tokens, inner] of the shared expert, if there is one.
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
        shared: a shared expert that this launch computes, too, for at most ``config.block_m``
            tokens, without biases and adapters; None: there is none, or it is computed elsewhere.
        gate_factors: [tokens, top_k] float32, contiguous, what the gate of each pair is multiplied
            by before "silu" or "gelu_tanh"; None: nothing.
        bound: that of BOUNDED.

    One launch a layer. It reads the weights of the chosen experts once for each block: with 8 of
    128 experts of 2 * 768 x 2048 in bfloat16, 50 MB for one token, 12 us at 4.3 TB/s; 805 MB, 190
    us, if all experts are chosen. 8,192 tokens have 0.41 Tflop: 0.7 ms at 600 TFLOP/s.
    """
    num_experts, width, k = weight.shape
    num_pairs, is_gated = len(x) * top_k, activation not in ALONE
    inner, parts = width // 2 if is_gated else width, parts_of(shared)
    num_rows = num_pairs + parts * len(x)
    assert out.shape == (num_rows, inner), "out: a row for each pair, as wide as the activation"
    assert activation in ACTIVATIONS, f"no activation {activation!r}"
    _check(out, x, weight, bias)
    check_gate_factors(gate_factors, num_pairs, activation)
    if num_pairs == 0:
        return
    columns_at_once = config.block_n // 2 if is_gated else config.block_n
    _check_shared(shared, len(x), bias, adapters, config)
    blocks, columns = _grid(num_pairs, num_experts, inner, columns_at_once, config.block_m)
    (multiply_gate_and_up if is_gated else multiply_up)[blocks + parts, columns](
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
        rows_of_gate_and_up(shared, len(x)),
        gate_factors,
        bound,
        TOP_K=top_k,
        PARTS=parts,
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
    top_k: int,
    pairs: SortedPairs,
    config: ProductConfig,
    adapters: PairAdapters | None = None,
    is_dependent: bool = False,
    shared: SharedExpert | None = None,
) -> None:
    """Writes each pair's product with the last projection of its expert.

    Args:
        out: [pairs, columns] contiguous, in the order of the pairs themselves. Behind these,
            [parts, tokens, columns] of the shared expert, if there is one.
        x: [pairs, k] contiguous, out's dtype, in the order of the sorted pairs, and of the parts.
        weight: [experts, columns, k], as in `gate_and_up`.
        bias: [experts, columns] contiguous, out's dtype, or None.
        top_k: the number of experts of each token.
        pairs: as in `gate_and_up`. Rows of ``out`` whose pair is not among them stay unchanged.
        config: as in `gate_and_up`.
        adapters: what is added, or None.
        is_dependent: whether the launch may begin before the launch before it has ended. It reads
            the blocks then, and waits. So the launch before must have begun after ``pairs`` were
            complete. The GPU must have compute capability 9.0.
        shared: as in `gate_and_up`.

    One launch a layer, half the bytes and operations of `gate_and_up`. Where it is dependent, the
    0.8 us until it starts and the 0.6 us for its blocks pass while `gate_and_up` ends.
    """
    num_experts, columns, k = weight.shape
    parts = parts_of(shared)
    num_tokens, rest = divmod(len(out), top_k + parts)
    assert rest == 0, "out: rows of whole tokens"
    assert x.shape == (len(out), k), "x: a row for each pair"
    assert out.shape[1:] == (columns,), "out has as many columns as the weights rows"
    _check(out, x, weight, bias)
    if len(out) == 0:
        return
    _check_shared(shared, num_tokens, bias, adapters, config)
    sizes = num_tokens * top_k, num_experts, columns, config.block_n, config.block_m
    blocks, tiles = _grid(*sizes)
    multiply_down[blocks + parts, tiles](
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
        rows_of_down(shared, num_tokens),
        TOP_K=top_k,
        PARTS=parts,
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


def _check_shared(
    shared: SharedExpert | None,
    num_tokens: int,
    bias: Tensor | None,
    adapters: PairAdapters | None,
    config: ProductConfig,
) -> None:
    if shared is None:
        return
    assert num_tokens <= config.block_m, "a block has all tokens of a part"
    assert bias is None, "experts beside a shared one have no bias"
    assert adapters is None, "experts beside a shared one have no adapters"


def _check(out: Tensor, x: Tensor, weight: Rows, bias: Tensor | None) -> None:
    assert out.is_contiguous(), "out must be contiguous"
    assert x.stride(1) == 1, "rows must be contiguous"
    check_rows(weight)
    dtypes = {out.dtype, x.dtype, *([weight.dtype] if isinstance(weight, Tensor) else [])}
    assert len(dtypes) == 1, "out, x and weights have one dtype"
    assert bias is None or bias.shape == weight.shape[:2], "bias: one for each row of the weights"
    assert bias is None or bias.is_contiguous(), "bias must be contiguous"
