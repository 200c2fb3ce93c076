"""Matrix products on a GPU: which kernel multiplies with which weights, in which tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Linear
from shmllm.models.matrices import WholeMatrix, len_of, parts_of
from shmllm.models.quantized import QuantizedMatrix
from shmllm.worker.gpu.many_products import ManyProducts
from shmllm_kernels.gpu.configs import (
    ROWS_OF_PRODUCTS,
    ProductConfig,
    has_dependent_launches,
    packed_config,
    product_config,
)
from shmllm_kernels.gpu.packings import PackedRows, Rows
from shmllm_kernels.gpu.products import linear as multiply_packed
from shmllm_kernels.gpu.row_operands import Activation


def rows_of(matrix: WholeMatrix) -> Rows:
    """Return a matrix as kernels take it."""
    if isinstance(matrix, QuantizedMatrix):
        return PackedRows.of(matrix.kind, matrix.integers, matrix.scales, matrix.shape[-1])
    return matrix


class GpuProducts:
    """Launches matrix products. torch multiplies with floating numbers, where no kernel of ours is
    faster, and a kernel of ours with packed weights.

    Args:
        deterministic: whether all steps have the same tile sizes, so that a token's bits do not
            depend on the number of tokens; not where torch multiplies.
        device: the device.
        many: launches products of many rows.

    Attributes:
        device: as given.
        is_dependent: whether a launch can begin before the one before it has ended.
    """

    def __init__(self, deterministic: bool, device: torch.device, many: ManyProducts) -> None:
        self._deterministic = deterministic
        self._many = many
        self.device = device
        self.is_dependent = has_dependent_launches(device)

    def linear(self, out: Tensor, x: Tensor, linear: Linear, *, has_bias: bool = True) -> None:
        """Compute ``out = x @ weight.T + bias`` without allocating memory.

        Args:
            out: [rows, out].
            x: [rows, in].
            linear: the weights; a product for each part whose format differs.
            has_bias: whether the bias is added, if there is one.
        """
        begin, bias = 0, linear.bias if has_bias else None
        for part in parts_of(linear.weight):
            end = begin + len_of(part)
            own = None if bias is None else bias[begin:end]
            self._multiply(out[:, begin:end], x, part, own)
            begin = end

    def activated(self, out: Tensor, x: Tensor, linear: Linear, activation: Activation) -> bool:
        """Compute the activation of ``x @ weight.T + bias`` if one launch can. Return whether it
        can.

        Args:
            out: [rows, out], or [rows, out / 2] for a gated activation.
            x: [rows, in].
            linear: the weights.
            activation: the activation.
        """
        weight = linear.weight
        if not isinstance(weight, Tensor) or not self._many.take(x, weight):
            return False
        self._many.multiply(out, x, weight, linear.bias, activation)
        return True

    def has_many(self, rows: int) -> bool:
        """Return whether products of so many rows are launches of ours, where matrices allow it."""
        return self._many.are_for(rows)

    def tile(self, rows: int) -> int:
        """Return which entry of the tables of tile sizes a product of so many rows has: steps with
        the same ones launch the same kernels."""
        return 0 if self._deterministic else sum(rows >= least for least in ROWS_OF_PRODUCTS)

    def config(self, rows: int, weight: Rows, dtype: torch.dtype) -> ProductConfig:
        """Return the tile sizes of a product.

        Args:
            rows: the number of rows; with experts, that of an expert, were they spread evenly.
            weight: the weights.
            dtype: the dtype of the rows.
        """
        rows = 0 if self._deterministic else rows
        if isinstance(weight, Tensor):
            return product_config(self.device, rows, dtype)
        return packed_config(self.device, rows, dtype)

    def _multiply(self, out: Tensor, x: Tensor, part: WholeMatrix, bias: Tensor | None) -> None:
        weight = rows_of(part)
        if isinstance(weight, PackedRows):
            multiply_packed(out, x, weight, bias, self.config(len(x), weight, x.dtype))
        elif self._many.take(x, weight):
            self._many.multiply(out, x, weight, bias)
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)
