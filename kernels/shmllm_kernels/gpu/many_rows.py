"""Launches the product of many rows with a matrix that is not packed.

`many_rows_kernel` says how the work is divided, and `few_rows` launches up to eight rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shmllm_kernels.gpu.many_rows_kernel import PartMemory, multiply_many_rows
from shmllm_kernels.gpu.row_configs import ManyRowsConfig
from shmllm_kernels.gpu.row_operands import Activation, check_product, is_gated

LEAST_ROWS, MOST_ROWS = 129, 256
"""The numbers of rows that the table's entries are for."""
LINE = 16
"""The bytes that addresses and strides of both operands are multiples of."""
MOST_BYTES = 2**31
"""What both operands are smaller than: Triton's launcher counts their bytes in an int."""


@dataclass(frozen=True, slots=True)
class ManyRowsScratch:
    """Memory for the parts of tiles that several programs compute.

    Attributes:
        sums: [programs, block_m * block_n] float32, contiguous.
        counters: [programs] int32, contiguous, 0 before and after each launch.
    """

    sums: Tensor
    counters: Tensor

    @classmethod
    def allocate(
        cls, config: ManyRowsConfig, processors: int, device: torch.device | str
    ) -> ManyRowsScratch:
        """Allocates the memory that any launch with some tile sizes needs.

        Args:
            config: the tile sizes.
            processors: the number of multiprocessors.
            device: the device.
        """
        programs = config.programs * processors
        return cls(
            torch.empty(programs, config.elements, dtype=torch.float32, device=device),
            torch.zeros(programs, dtype=torch.int32, device=device),
        )


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the operands lie as the kernel reads them."""
    return all(
        each.stride(1) == 1
        and each.data_ptr() % LINE == 0
        and each.stride(0) * each.itemsize % LINE == 0
        and len(each) * each.stride(0) * each.itemsize < MOST_BYTES
        for each in (x, weight)
    )


def num_programs(
    config: ManyRowsConfig, rows: int, columns: int, k: int, gated: bool, processors: int
) -> int:
    """Returns the number of programs of a launch: one for each place on a multiprocessor, or so
    many for each tile that nine tenths of the places have one.

    Args:
        config: the tile sizes.
        rows: the number of rows.
        columns: that of columns of the result.
        k: that of elements of a row.
        gated: whether a column is the product of two.
        processors: the number of multiprocessors.
    """
    tiles = -(-rows // config.block_m) * -(-columns // config.width(gated))
    places = config.programs * processors
    whole = places // tiles * tiles
    wanted = whole if 10 * whole >= 9 * places else places
    return min(wanted, tiles * -(-k // config.block_k))


def multiply_rows(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    config: ManyRowsConfig,
    scratch: ManyRowsScratch,
    processors: int,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    is_dependent: bool = False,
) -> None:
    """Computes ``x @ weight.T + bias`` and the activation of it.

    Sums are float32. It rounds the product before the activation, and the activation before its
    multiplication. The bits of a row depend on the number of rows, as the parts of tiles do.

    Args:
        out: [rows, n], each row contiguous; not ``x``. With a gated activation n is half of the
            rows of ``weight``.
        x: [rows, k], out's dtype: float32, float16 or bfloat16; see `takes`.
        weight: [n, k], or [2 * n, k] for a gated activation, out's dtype; see `takes`.
        config: the tile sizes.
        scratch: memory of these tile sizes and multiprocessors.
        processors: the number of multiprocessors.
        bias: [rows of weight], contiguous, out's dtype, or None.
        activation: the activation; None: there is none.
        is_dependent: whether the launch may begin before the launch before it has ended. The GPU
            must have compute capability 9.0.

    The matrices of Llama-3.1-8B in bfloat16 with 256 rows on an H200, whose 132 multiprocessors
    multiply at 793 TFLOP/s in large products of cuBLAS, 6.0 each (m: measured with cuBLAS; the rest
    is expected, to be confirmed or refuted). An iteration of 128 x 256 x 64 takes 0.70 us at that
    rate, in which it needs 48 KiB of the L2 cache: 9.3 TB/s for all of them. The table assumes 7.4,
    0.88 us, and 0.58 us for 128 x 128 x 64, which needs 32 KiB; cuBLAS needs less, because two
    multiprocessors share a tile of one operand. Filling the pipeline of a tile takes 1.5 us, and a
    part of 128 KiB 5 us to store and to load.

    =============  =============  =======  =========================  ==========  ========
    matrix         weights        flops    programs, iterations each  cuBLAS (m)  expected
    =============  =============  =======  =========================  ==========  ========
    qkv            6144 x 4096    12.9 G   132, 46.5 of 128 x 128     24.5 us     31 us
    output         4096 x 4096    8.6 G    128, 32 of 128 x 128       17.8 us     22 us
    gate, up       28672 x 4096   60.1 G   132, 108.6 of 128 x 256    105 us      103 us
    with SiLU                                                         111 us      103 us
    down           4096 x 14336   30.1 G   128, 112 of 128 x 128      53.7 us     69 us
    head           128256 x 4096  269 G    132, 486 of 128 x 256      425 us      436 us
    =============  =============  =======  =========================  ==========  ========

    So gate and up gain by the equal shares, which take 0.85 of two waves, and by the activation: 8
    us a layer, 0.26 ms of a step of 16.7 ms. The others gain nothing unless the cache is faster.
    """
    num_rows, n = out.shape
    height, k = weight.shape
    gated = is_gated(activation, height, n)
    if num_rows == 0 or n == 0:
        return
    check_product(out, x, height, k, bias)
    assert takes(x, weight), f"rows are contiguous, begin at {LINE} bytes, and are few"
    assert weight.dtype is x.dtype, "x and weight have one dtype"
    programs = num_programs(config, num_rows, n, k, gated, processors)
    assert len(scratch.counters) >= programs, "scratch has too few programs"
    assert scratch.sums.shape[1] >= config.elements, "scratch has smaller tiles"
    multiply_many_rows[(programs,)](
        out,
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.width(gated), config.block_k]),
        x if bias is None else bias,
        PartMemory(scratch.sums, scratch.counters),
        num_rows,
        n,
        k,
        out.stride(0),
        HAS_BIAS=bias is not None,
        NAME=None if activation is None else activation.name,
        IS_GATED=gated,
        IS_DEPENDENT=is_dependent,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if is_dependent else {}),
    )
