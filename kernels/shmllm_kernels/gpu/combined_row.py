"""Launches the last products of one token's experts together with their sum."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from shmllm_kernels.gpu.combined_row_kernel import combine_packed_row, combine_single_row
from shmllm_kernels.gpu.expert_sums import WeightedSum
from shmllm_kernels.gpu.packings import Rows
from shmllm_kernels.gpu.products import check_rows, memory_of, strides_of
from shmllm_kernels.gpu.row_configs import SingleRowConfig
from shmllm_kernels.gpu.shared_expert import SharedExpert, parts_of, rows_of_down
from shmllm_kernels.gpu.single_row import options_of


def combine_products(
    total: WeightedSum,
    x: Tensor,
    weight: Rows,
    config: SingleRowConfig,
    ids: Tensor,
    bias: Tensor | None = None,
    is_dependent: bool = False,
    shared: SharedExpert | None = None,
) -> None:
    """Writes the sum over the products of one token's experts: of each row of ``x`` with the matrix
    of its expert, plus the bias, rounded to out's dtype. The bits are those of `multiply_row` and
    `combine` with the same tile.

    Args:
        total: the sum, of one token.
        x: [top_k + parts, k], contiguous, a row for each expert, and for each part of the shared
            one; the dtype of ``total.out``.
        weight: [experts, n, k], contiguous, out's dtype; or packed, and its values are rounded to
            out's dtype.
        config: the tile sizes, from `single_row.config_of`.
        ids: [top_k] int32, as in `multiply_row`.
        bias: [experts, n], contiguous, out's dtype, or None.
        is_dependent: as in `multiply_row`.
        shared: a shared expert that this launch computes, too, without biases; None: there is none,
            or ``total`` has its output.

    One launch a layer, which reads the matrices of the chosen experts once: 8 of 2,048 x 768 in
    bfloat16 are 25 MB, 5.9 us at 4.26 TB/s. Its 512 programs are 3.9 on each of 132
    multiprocessors, with two tiles of 6 KiB each: 47 KiB in flight, where 29 KiB cover 0.9 us. A
    dependent launch takes 0.6 us until it begins, 0.6 us each for the experts and their first
    weights, and 0.4 us for results: 8.1 us. Without it the products took as long, `combine` 1.8 us
    more, and the sum with the residual stream as a launch of its own another 1.8 us.

    With a shared expert a thread has 233 registers in place of 176, so that four programs fit on a
    multiprocessor and not five: all 512 still run at once. The 1,792 of DeepSeek-V3 are 3.4 waves
    in place of 2.3; whether its shared expert is faster here, only a GPU says.
    """
    num_experts, n, k = weight.shape
    top_k, parts = len(ids), parts_of(shared)
    _check(total, x, weight, ids, bias, parts)
    memory: tuple[Tensor, ...] = memory_of(weight)
    strides: tuple[int, ...] = strides_of(weight)
    tile = options_of(weight, config)
    kernel: Any = combine_packed_row
    if isinstance(weight, Tensor):
        kernel, memory, strides = combine_single_row, memory[:1], (weight.stride(-2),)
        tile["IS_WHOLE"] = n % config.block_n == 0 and k % config.block_k == 0
    kernel[(triton.cdiv(n, config.block_n),)](
        total.out,
        x,
        *memory,
        bias,
        ids,
        total.weights,
        total.shared,
        total.gates,
        num_experts,
        n,
        k,
        *strides,
        total.scale,
        rows_of_down(shared, 1),
        ADDS=total.adds,
        TOP_K=top_k,
        PARTS=parts,
        IS_DEPENDENT=is_dependent,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=1,
        **tile,
        **({"launch_pdl": True} if is_dependent else {}),
    )


def _check(
    total: WeightedSum, x: Tensor, weight: Rows, ids: Tensor, bias: Tensor | None, parts: int
) -> None:
    (_, n, k), top_k = weight.shape, len(ids)
    total.check(top_k, n)
    assert len(total.out) == 1, "one token"
    assert x.shape == (top_k + parts, k), "x: a row for each expert"
    assert not parts or total.shared is None, "the shared expert is computed once"
    assert not parts or bias is None, "experts beside a shared one have no bias"
    assert x.is_contiguous(), "x must be contiguous"
    assert x.dtype is total.out.dtype, "out and x have one dtype"
    if isinstance(weight, Tensor):
        assert weight.dtype is x.dtype, "x and weight have one dtype"
        assert weight.is_contiguous(), "experts must lie one after the other"
    else:
        check_rows(weight)
    if bias is not None:
        assert bias.shape == weight.shape[:-1], "bias: one for each row of weight"
        assert bias.is_contiguous(), "bias must be contiguous"
