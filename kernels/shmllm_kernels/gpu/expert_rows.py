"""The products of one token with the weights of its experts.

They are those of `single_row` and `packed_row`: a program reads from device memory which expert it
computes. So nothing is sorted, and a captured graph serves every choice.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from shmllm_kernels.gpu.configs import packed_row_config, single_row_config
from shmllm_kernels.gpu.experts import ACTIVATIONS
from shmllm_kernels.gpu.packed_row import multiply_packed_row
from shmllm_kernels.gpu.packings import RUN, Rows
from shmllm_kernels.gpu.products import check_rows, memory_of, strides_of
from shmllm_kernels.gpu.single_row import multiply_single_row
from shmllm_kernels.gpu.unpacking import FLAGS


def multiply_expert_rows(
    out: Tensor,
    x: Tensor,
    weight: Rows,
    ids: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    is_dependent: bool = False,
) -> None:
    """Writes the product of a row with each chosen expert's weights, or the activation of it.

    Products are float32 up to the result, which is rounded once, as in `experts`.

    Args:
        out: [top_k, n] contiguous.
        x: [1, k], the row of all experts, or [top_k, k], a row of each; contiguous, out's dtype.
        weight: [experts, n, k], or [experts, 2 * n, k] for an activation with gates, contiguous,
            out's dtype; or packed, and the values are rounded to out's dtype.
        ids: [top_k] int32, the experts. One that does not exist stands for the first.
        bias: [experts, rows of the weights] contiguous, out's dtype, or None.
        activation: one of `experts.ACTIVATIONS`, or None.
        is_dependent: see `single_row.multiply_row`. The experts may be chosen by the launch before.

    Reads the weights of the chosen experts once: with 8 of 128 experts of 2 * 768 x 2048 in
    bfloat16, 50 MB, 12 us at 4.26 TB/s; no measurement has confirmed that.
    """
    top_k, n = out.shape
    num_experts, height, k = weight.shape
    is_gated = activation not in (None, "relu_squared")
    assert height == (2 * n if is_gated else n), "weights: rows for each column of out"
    assert x.shape in ((1, k), (top_k, k)), "x: one row, or one for each expert"
    assert ids.shape == (top_k,), "ids: one for each row of out"
    assert activation is None or activation in ACTIVATIONS, f"no activation {activation!r}"
    assert out.is_contiguous(), "out must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    assert bias is None or bias.shape == (num_experts, height), "bias: one for each row of weights"
    assert bias is None or bias.is_contiguous(), "bias must be contiguous"
    check_rows(weight)
    if top_k == 0 or n == 0:
        return
    is_packed = not isinstance(weight, Tensor)
    config = packed_row_config() if is_packed else single_row_config(height, k)
    block_n = max(config.block_n // 2, 1) if is_gated and not is_packed else config.block_n
    kernel: Any = multiply_packed_row if is_packed else multiply_single_row
    tile: dict[str, Any] = {"RUNS": config.block_k // RUN, **FLAGS}
    if isinstance(weight, Tensor):
        is_whole = n % block_n == 0 and k % config.block_k == 0
        tile = {"BLOCK_K": config.block_k, "IS_WHOLE": is_whole}
    else:
        tile["PACKING"] = weight.packing
    memory, strides = memory_of(weight), strides_of(weight)
    kernel[(triton.cdiv(n, block_n), top_k)](
        out,
        x,
        *(memory if is_packed else memory[:1]),
        x if bias is None else bias,
        x,
        ids,
        num_experts,
        n,
        k,
        height,
        0 if len(x) == 1 else k,
        *(strides if is_packed else strides[:1]),
        0.0,
        0.0,
        1.0,
        HAS_NORM=False,
        HAS_BIAS=bias is not None,
        ADDS=False,
        NAME=activation,
        IS_GATED=is_gated,
        HAS_EXPERTS=True,
        IS_DEPENDENT=is_dependent,
        BLOCK_N=block_n,
        num_warps=config.num_warps,
        num_stages=1,
        **tile,
        **({"launch_pdl": True} if is_dependent else {}),
    )
