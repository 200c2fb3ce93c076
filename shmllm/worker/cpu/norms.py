"""Records norms of rows in a kernel program. A product that reads a norm's result next lets the
norm round it, see `products.ROUNDING`."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import Norm
from shmllm.worker.cpu.products import kind_of
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.norms import ADD_LAYER_NORM, ADD_RMS_NORM


def record_norm(
    program: KernelProgram,
    num_rows: int,
    x: Tensor | None,
    residual: Tensor,
    norm: Norm,
    out: Tensor,
    scale: float = 1.0,
) -> None:
    """Record ``residual += scale * x; out = norm(residual)``.

    Args:
        program: the program to record in.
        num_rows: the address of an int64, the number of rows.
        x: [rows, width] float32, or None: nothing is added.
        residual: [rows, width] float32, with any stride between rows.
        norm: the norm.
        out: [rows, width] float32; it may be `residual`, whose rows lie one after the other then,
            unless the norm is an RMSNorm.
        scale: the factor of `x`.
    """
    added = 0 if x is None else x.data_ptr()
    addresses = [added, residual.data_ptr(), norm.weight.data_ptr(), out.data_ptr()]
    sizes = [out.shape[1], word_of_float(norm.spec.eps), word_of_float(scale)]
    offset, stride = word_of_float(norm.spec.offset), 4 * residual.stride(0)
    if norm.spec.kind == "rms":
        kernels, rest = ADD_RMS_NORM, [offset, stride]
    else:
        bias = 0 if norm.bias is None else norm.bias.data_ptr()
        kernels, rest = ADD_LAYER_NORM, [bias, stride, offset]
    label = f"{norm.spec.kind}_norm" if x is None else f"add_{norm.spec.kind}_norm"
    kernel = kernels[kind_of(norm.weight)]
    program.record(kernel, [num_rows, *addresses, *sizes, *rest], label=label)
