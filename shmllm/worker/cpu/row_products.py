"""Matrix products of a tower on a CPU, by the kernels of steps: the bits of a row depend neither on
the others nor on the number of threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shmllm.worker.cpu.block_products import BlockProducts
from shmllm.worker.cpu.product_kernels import rounded_bytes
from shmllm.worker.cpu.products import Products
from shmllm_kernels.cpu import KernelProgram

ROWS = 512
"""How many rows are computed at a time."""


class _Dense(NamedTuple):
    """A weight, [out, in], and its bias, [out] or None."""

    weight: Tensor
    bias: Tensor | None


class RowProducts:
    """Computes ``x @ weight.T + bias``, some rows at a time. A product is recorded when it is
    computed first.

    Args:
        num_threads: the number of threads that compute.
        activation_dtype, uses_tiles: as for `Products`.
    """

    def __init__(self, num_threads: int, activation_dtype: str, uses_tiles: bool) -> None:
        self._program = KernelProgram(num_threads)
        self._num_rows = np.zeros(1, np.int64)
        self._arithmetic = activation_dtype, uses_tiles
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._recorded: dict[int, range] = {}
        self._of_columns = BlockProducts(num_threads)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [rows, out] in the dtype of x.

        Args:
            x: [rows, in].
            weight: [out, in], whose address identifies it.
            bias: [out] or None, the same each time.
        """
        if not weight.is_contiguous():  # no kernel reads the transpose of a matrix
            return self._of_columns(x, weight, bias)
        source, target = self._buffer("in", x.shape[1]), self._buffer("out", len(weight))
        place = weight.data_ptr()
        if place not in self._recorded:
            self._recorded[place] = self._record(source, _Dense(weight, bias), target)
        found = x.new_empty(len(x), len(weight))
        for begin in range(0, len(x), ROWS):
            part = x[begin : begin + ROWS]
            count = self._num_rows[0] = len(part)
            source[:count] = part
            self._program.replay(self._recorded[place])
            found[begin : begin + count] = target[:count]
        return found

    def _buffer(self, kind: str, width: int) -> Tensor:
        if (kind, width) not in self._buffers:
            self._buffers[kind, width] = torch.empty(ROWS, width)
        return self._buffers[kind, width]

    def _record(self, source: Tensor, dense: _Dense, target: Tensor) -> range:
        """Record a product, which rounds its own activations: they differ in each replay."""
        dtype, begin = self._arithmetic[0], len(self._program)
        size = rounded_bytes(ROWS, source.shape[1], dtype)
        if ("rounded", size) not in self._buffers:
            self._buffers["rounded", size] = torch.empty(size, dtype=torch.uint8)
        rounded = self._buffers["rounded", size]
        products = Products(self._program, rounded, *self._arithmetic)
        products.record(self._num_rows.ctypes.data, source, dense, target)
        return range(begin, len(self._program))
