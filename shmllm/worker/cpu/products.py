"""Matrix products on a CPU: which kernel computes one, and what its activations are rounded to."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.config.engine import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.experts import ExpertLinear
from shmllm.models.layers import Linear, Matrix
from shmllm.models.quantized import Int8Matrix
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16
from shmllm_kernels.cpu.products import MULTIPLY
from shmllm_kernels.cpu.rows import ROUND

Kinds = tuple[str, str, str]
"""The dtype names of activations, weights and bias, by which kernels are chosen."""


def kind_of(weight: Matrix) -> str:
    """Return the name of the weight's dtype, by which kernels are chosen."""
    return str(weight.dtype).removeprefix("torch.")


class Products:
    """Records matrix products in a kernel program.

    Args:
        program: the program to record in.
        rounded: memory for the rounded activations of any product, or None: activations stay
            float32. They are rounded to its dtype before a product with weights of this dtype.
    """

    def __init__(self, program: KernelProgram, rounded: Tensor | None) -> None:
        self._kernels = program
        self._rounded = rounded

    def kinds(self, linear: Linear | ExpertLinear, is_exact: bool = False) -> Kinds:
        """Return the kinds of a projection's product.

        Args:
            linear: the weight and the bias.
            is_exact: whether activations must stay float32.
        """
        dtype = kind_of(linear.weight)
        if isinstance(linear.weight, Int8Matrix):
            return "float32", "int8", dtype
        rounded = self._rounded
        if is_exact or rounded is None or rounded.dtype != linear.weight.dtype:
            return "float32", dtype, dtype
        return dtype, dtype, dtype

    def activations(self, num_rows: int, x: Tensor, kind: str) -> Tensor:
        """Record the rounding of activations, and return what it writes, which the next call
        overwrites; or return ``x`` if they stay float32.

        Args:
            num_rows: the address of an int64, the number of rows.
            x: [rows, in] float32.
            kind: the dtype name of the result.
        """
        if kind == "float32":
            return x
        assert self._rounded is not None, "`kinds` says so"
        rounded = self._rounded[: x.numel()].view(x.shape)
        operands = [num_rows, x.data_ptr(), rounded.data_ptr(), x.shape[1]]
        self._kernels.record(ROUND[kind], operands, label="round")
        return rounded

    def record(
        self, num_rows: int, x: Tensor, linear: Linear, out: Tensor, is_exact: bool = False
    ) -> None:
        """Record ``out = x @ weight.T + bias``.

        Args:
            num_rows: the address of an int64, the number of rows to compute.
            x: [rows, in] float32.
            linear: the weight and the bias.
            out: [rows, out] float32.
            is_exact: whether activations must stay float32.
        """
        kinds = self.kinds(linear, is_exact)
        x = self.activations(num_rows, x, kinds[0])
        numbers, scales = weights_of(linear.weight)
        rows = [x.data_ptr(), x.element_size() * x.shape[1], out.data_ptr(), 4 * out.shape[1]]
        bias = 0 if linear.bias is None else linear.bias.data_ptr()
        operands = [num_rows, *rows, numbers.data_ptr(), *numbers.shape, scales, bias]
        size = f"{numbers.shape[0]}x{numbers.shape[1]}"
        self._kernels.record(MULTIPLY[kinds], operands, label=f"multiply {size}")


def weights_of(weight: Matrix) -> tuple[Tensor, int]:
    """Return a matrix's numbers, and the address of its scales or 0."""
    if isinstance(weight, Int8Matrix):
        return weight.integers, weight.scales.data_ptr()
    return weight, 0


def activation_dtype(load: LoadConfig, dtype: torch.dtype) -> str:
    """Return the dtype name that products round activations to.

    Args:
        load: the options.
        dtype: the dtype of the weights.

    Raises:
        EngineStartError: they cannot be rounded as asked.
    """
    wanted, lacking = load.activation_dtype, None
    if load.quantization is not None:
        lacking = f"quantization={load.quantization!r} multiplies with float32"
    elif dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        lacking = f"the weights are {name}: start with dtype='bfloat16'"
    elif not HAS_BFLOAT16:
        lacking = "this CPU has no AVX512_BF16"
    if wanted == "auto":
        return "bfloat16" if lacking is None else "float32"
    if wanted == "bfloat16" and lacking is not None:
        raise EngineStartError(f"activation_dtype='bfloat16' is not possible: {lacking}")
    return wanted
