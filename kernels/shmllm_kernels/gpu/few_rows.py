"""Launches the product of up to eight rows with a matrix, packed or not, and with adapters.

`few_rows_kernel` says what a launch waits for, and `single_row` launches what one row needs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from shmllm_kernels.gpu.configs import device_key
from shmllm_kernels.gpu.few_rows_kernel import NormedRows, NormedSum, multiply_few_rows
from shmllm_kernels.gpu.packings import RUN, Rows
from shmllm_kernels.gpu.products import check_rows, memory_of, strides_of
from shmllm_kernels.gpu.row_adapters import RowAdapters, operands_of
from shmllm_kernels.gpu.row_configs import FewRowsConfig, few_rows_config
from shmllm_kernels.gpu.row_operands import (
    Activation,
    AddedNorm,
    RowNorm,
    check_factors,
    check_product,
    is_gated,
)
from shmllm_kernels.gpu.unpacking import FLAGS

MAX_ROWS = 8
"""The rows of a launch: the columns of the smallest product that tensor cores compute."""


def config_of(weight: Rows, dtype: torch.dtype, device: torch.device) -> FewRowsConfig:
    """Returns the tile of a product of few rows, of a dtype, with a matrix, on a device."""
    height, is_packed = weight.shape[0], not isinstance(weight, Tensor)
    return few_rows_config(height, dtype, is_packed, device_key(device))


def multiply_rows(
    out: Tensor,
    x: Tensor,
    weight: Rows,
    config: FewRowsConfig,
    bias: Tensor | None = None,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    adds: bool = False,
    scale: float = 1.0,
    is_dependent: bool = False,
    adapters: RowAdapters | None = None,
    added: AddedNorm | None = None,
    factors: Tensor | None = None,
) -> None:
    """Computes ``norm(x) @ weight.T + bias`` with what adapters add, and the activation of it.

    Sums are float32. It rounds what the product reads, the product before the activation, the
    activation before its multiplication, and the addend of the sum. An RMSNorm of bfloat16 and
    float32 gets its factor behind the product; a LayerNorm is computed before, and so is a norm of
    float16, in which a row without its factor may be too large.

    Args:
        out: [rows, n], up to MAX_ROWS rows, each contiguous; not ``x``. With a gated activation n
            is half of the rows of ``weight``.
        x: [rows, k], each row contiguous; out's dtype: float32, float16 or bfloat16.
        weight: [n, k], or [2 * n, k] for a gated activation, out's dtype, with any stride between
            rows; or packed, and its values are rounded to out's dtype.
        config: the tile sizes, from `config_of`.
        bias: [rows of weight], contiguous, or None.
        norm: the norm of each row; None: they have none.
        activation: the activation; None: there is none.
        adds: whether ``scale`` times the product is added to ``out``.
        scale: the factor of the product in that sum.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0. All weights must be complete by then.
        adapters: what is added to the product, before the activation; None: nothing.
        added: what is added to ``x`` before anything else; None: nothing.
        factors: [rows, n], each row contiguous, out's dtype, what the activation is multiplied by,
            which may be ``out`` itself; None: nothing.

    Reads ``weight`` once, and the rows once for each program. The matrices of a layer of
    Llama-3.2-1B in bfloat16, 8 rows, 132 multiprocessors, 4.26 TB/s (to be confirmed or refuted):

    =========  ============  =======================  ============  =======  ========
    matrix     weights       programs, 264 at a time  rows, of L2   bytes    expected
    =========  ============  =======================  ============  =======  ========
    qkv        3072 x 2048   192                      6 MB          3.0 us   4.8 us
    output     2048 x 2048   128                      4 MB          2.0 us   3.5 us
    gate, up   16384 x 2048  512, in 1.9 waves        17 MB         15.8 us  18.5 us
    down       2048 x 8192   128                      17 MB         7.9 us   9.5 us
    =========  ============  =======================  ============  =======  ========

    Together 36.3 us a layer, of which 28.7 are bytes. 16 layers, the head (124 us) and 40 us of
    inputs, embedding and sampling are 745 us; 16 times 9 us of attention make 889 us, a share of
    0.72 where the launches of larger steps took 1,203 us, 0.53.
    """
    num_rows, n = out.shape
    height, k = weight.shape
    gated = is_gated(activation, height, n)
    if num_rows == 0 or n == 0:
        return
    _check(out, x, weight, bias, norm)
    if added is not None:
        added.check(x)
    check_factors(factors, out, adds)
    columns = config.block_n // 2 if gated else config.block_n
    programs, operands = triton.cdiv(n, columns), None
    if adapters is not None:
        operands = operands_of(adapters, x, height, config.block_n)
        programs += operands.num_programs
    packing = None if isinstance(weight, Tensor) else weight.packing
    memory, strides = memory_of(weight), strides_of(weight)
    if isinstance(weight, Tensor):
        strides = weight.stride(0), 0
    assert packing is None or 2 * config.depth == RUN, "a slice of an iteration is a run"
    multiply_few_rows[(programs,)](
        out,
        _rows_of(x, norm, added),
        *memory,
        x if bias is None else bias,
        factors,
        operands,
        n,
        out.stride(0),
        0 if factors is None else factors.stride(0),
        *strides,
        scale,
        **_norm_options(norm, x.dtype),
        HAS_OFFSET=added is not None and added.norm.offset != 0,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        NAME=None if activation is None else activation.name,
        IS_GATED=gated,
        IS_WHOLE=n % columns == 0 and k % (2 * config.depth * config.num_warps) == 0,
        IS_DEPENDENT=is_dependent,
        PACKING=packing,
        BLOCK_N=config.block_n,
        ROWS=MAX_ROWS,
        SLICES=config.num_warps,
        DEPTH=config.depth,
        num_warps=config.num_warps,
        # Tiles of what is added take as much shared memory as those of the rows: with fewer of
        # them two programs fit on a multiprocessor.
        num_stages=config.num_stages if added is None else min(config.num_stages, 2),
        **({} if packing is None else FLAGS),
        **({"launch_pdl": True} if is_dependent else {}),
    )


def _rows_of(x: Tensor, norm: RowNorm | None, added: AddedNorm | None) -> NormedRows:
    num_rows, k = x.shape
    sums: NormedSum | None = None
    if added is not None:
        of, strides = added.norm, (added.x.stride(0), added.kept.stride(0))
        sums = NormedSum(added.x, of.weight, added.kept, *strides, of.eps, of.offset, added.scale)
    sizes, factor = (num_rows, k, x.stride(0)), None if added is None else added.factor
    if norm is None:
        return NormedRows(x, x, x, *sizes, 0.0, 0.0, sums, factor)
    bias = x if norm.bias is None else norm.bias
    return NormedRows(x, norm.weight, bias, *sizes, norm.eps, norm.offset, sums, factor)


def _norm_options(norm: RowNorm | None, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the constants of the kernel that depend on the norm."""
    if norm is None:
        return {"NORM": None, "IS_FIRST": False}
    if not norm.has_mean:
        return {"NORM": "rms", "IS_FIRST": dtype is torch.float16}
    return {"NORM": "layer" if norm.bias is not None else "centered", "IS_FIRST": True}


def _check(out: Tensor, x: Tensor, weight: Rows, bias: Tensor | None, norm: RowNorm | None) -> None:
    height, k = weight.shape
    assert len(x) <= MAX_ROWS, f"at most {MAX_ROWS} rows"
    check_product(out, x, height, k, bias)
    if isinstance(weight, Tensor):
        assert weight.dtype is x.dtype, "x and weight have one dtype"
        assert weight.stride(1) == 1, "rows of weight must be contiguous"
    else:
        check_rows(weight)
    if norm is not None:
        norm.check(k)
