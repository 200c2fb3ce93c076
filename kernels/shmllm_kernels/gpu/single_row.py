"""Launches the product of one row with a matrix, or with those of its experts.

Weights may be packed. A program reads from device memory which expert it computes: so nothing is
sorted, and a captured graph serves every choice. `single_row_kernel` says what a launch waits for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from shmllm_kernels.gpu.configs import device_key
from shmllm_kernels.gpu.packed_row_kernel import multiply_packed_row
from shmllm_kernels.gpu.packings import RUN, Rows
from shmllm_kernels.gpu.products import check_rows, memory_of, strides_of
from shmllm_kernels.gpu.row_configs import SingleRowConfig, packed_row_config, single_row_config
from shmllm_kernels.gpu.row_operands import (
    Activation,
    RowNorm,
    check_factors,
    check_gate_factors,
    is_gated,
)
from shmllm_kernels.gpu.shared_expert import SharedExpert, parts_of, rows_of_gate_and_up
from shmllm_kernels.gpu.single_row_kernel import multiply_single_row
from shmllm_kernels.gpu.unpacking import FLAGS


def config_of(weight: Rows, device: torch.device) -> SingleRowConfig:
    """Returns the tile of a product of one row with a matrix, or with several, on a device."""
    (*_, height, k), key = weight.shape, device_key(device)
    if isinstance(weight, Tensor):
        return single_row_config(height, k, key)
    return packed_row_config(k, key)


def multiply_row(
    out: Tensor,
    x: Tensor,
    weight: Rows,
    config: SingleRowConfig,
    bias: Tensor | None = None,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    adds: bool = False,
    scale: float = 1.0,
    is_dependent: bool = False,
    ids: Tensor | None = None,
    factors: Tensor | None = None,
    shared: SharedExpert | None = None,
    gate_factors: Tensor | None = None,
) -> None:
    """Computes ``norm(x) @ weight.T + bias``, and the activation of it, for one row, or for one row
    of each chosen expert.

    Products, norm and sums are float32. It rounds the product before the activation, the activation
    before its multiplication, and the addend of the sum, as the operations of their own do; but the
    normalised row, which they round, stays float32. Of experts it rounds the result only, as
    `experts` does.

    Args:
        out: [1, n], or [top_k + parts, n] with ``ids``, contiguous; not ``x``. With a gated
            activation n is half of the rows of ``weight``.
        x: [1, k], contiguous, out's dtype: float32, float16 or bfloat16.
        weight: [n, k], or [2 * n, k] for a gated activation, out's dtype, with any stride between
            rows; or packed, and its values are rounded to out's dtype. With ``ids`` [experts, ...]
            of them, contiguous.
        config: the tile sizes, from `config_of`.
        bias: [rows of weight], or [experts, rows] with ``ids``, contiguous, or None.
        norm: the norm of ``x``; None: it has none.
        activation: the activation; None: there is none.
        adds: whether ``scale`` times the product is added to ``out``.
        scale: the factor of the product in that sum.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0. All weights must be complete by then.
        ids: [top_k] int32, the experts, which the launch before may choose. One that does not exist
            stands for the first. None: there are no experts.
        factors: [1, n], contiguous, out's dtype, what the activation is multiplied by, which may be
            ``out`` itself; None: nothing.
        shared: a shared expert that this launch computes, too, with ``ids`` and without biases: its
            parts are further rows of ``out``. None: there is none, or it is computed elsewhere.
        gate_factors: [1, top_k] float32, contiguous, with ``ids``: what the gate of each expert is
            multiplied by before "silu" or "gelu_tanh"; None: nothing.

    Reads ``weight`` once: 7.9 us for 8,192 x 2,048 in bfloat16 at 4.26 TB/s, and about 1.5 us more,
    from the end of the launch before until the last result is written; 8 of 128 experts of 2 * 768
    x 2048, 50 MB, 12 us. 2 flops for each weight.
    """
    num_rows, n = out.shape
    *experts, height, k = weight.shape
    gated, parts = is_gated(activation, height, n), parts_of(shared)
    _check(out, x, weight, bias, norm, ids, parts)
    assert factors is None or ids is None, "experts have no factors"
    check_factors(factors, out, adds)
    name = None if activation is None else activation.name
    check_gate_factors(gate_factors, 0 if ids is None else len(ids), name)
    if num_rows == 0 or n == 0:
        return
    memory: tuple[Tensor, ...] = memory_of(weight)
    strides: tuple[int, ...] = strides_of(weight)
    tile = options_of(weight, config)
    block_n = max(config.block_n // 2, 1) if gated else config.block_n
    kernel: Any = multiply_packed_row
    if isinstance(weight, Tensor):
        kernel, memory, strides = multiply_single_row, memory[:1], (weight.stride(-2),)
        tile["IS_WHOLE"] = n % block_n == 0 and k % config.block_k == 0
    kernel[(triton.cdiv(n, block_n), num_rows)](
        out,
        x,
        *memory,
        x if bias is None else bias,
        x if norm is None else norm.weight,
        x if ids is None else ids,
        factors,
        experts[0] if experts else 1,
        n,
        k,
        height,
        *strides,
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
        scale,
        rows_of_gate_and_up(shared, 1),
        gate_factors,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        NAME=name,
        IS_GATED=gated,
        HAS_EXPERTS=ids is not None,
        CHOICES=num_rows - parts,
        IS_DEPENDENT=is_dependent,
        BLOCK_N=block_n,
        num_warps=config.num_warps,
        num_stages=1,
        **tile,
        **({"launch_pdl": True} if is_dependent else {}),
    )


def options_of(weight: Rows, config: SingleRowConfig) -> dict[str, Any]:
    """Returns the constants of the kernel that depend on how the weights are stored."""
    if isinstance(weight, Tensor):
        return {"BLOCK_K": config.block_k}
    assert config.block_k % RUN == 0, "an iteration takes whole runs"
    return {"PACKING": weight.packing, "RUNS": config.block_k // RUN, **FLAGS}


def _check(
    out: Tensor,
    x: Tensor,
    weight: Rows,
    bias: Tensor | None,
    norm: RowNorm | None,
    ids: Tensor | None,
    parts: int,
) -> None:
    *experts, _, k = weight.shape
    assert not parts or bias is None, "experts beside a shared one have no bias"
    if ids is None:
        assert len(out) == 1, "one row"
        assert not parts, "a shared expert has others beside it"
        assert not experts, "a matrix"
    else:
        assert ids.shape == (len(out) - parts,), "ids: one for each row of out"
        assert len(experts) == 1, "weight: a matrix of each expert"
    assert x.shape == (1, k), "x: one row, as long as those of weight"
    assert out.is_contiguous(), "out must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    assert out.dtype is x.dtype, "out and x have one dtype"
    assert out.data_ptr() != x.data_ptr() or out.is_meta, "out may not be x"
    if isinstance(weight, Tensor):
        assert weight.dtype is x.dtype, "x and weight have one dtype"
        assert weight.stride(-1) == 1, "rows of weight must be contiguous"
        assert not experts or weight.is_contiguous(), "experts must lie one after the other"
    else:
        check_rows(weight)
    if bias is not None:
        assert bias.shape == weight.shape[:-1], "bias: one for each row of weight"
        assert bias.is_contiguous(), "bias must be contiguous"
    if norm is not None:
        norm.check(k)
