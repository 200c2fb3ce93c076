"""Matrix products of a tower on a CPU, by the kernels of steps: the bits of a row depend neither on
the others nor on the number of threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shmllm.worker.cpu.product_kernels import row_bytes
from shmllm.worker.cpu.products import Products
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.tile_rounding import BLOCK_ROWS


class _Dense(NamedTuple):
    """A weight, [out, in], and its bias, [out] or None."""

    weight: Tensor
    bias: Tensor | None


class RowProducts:
    """Computes ``x @ weight.T + bias``. A product is recorded when it is computed first.

    Args:
        most_rows: the most rows of a product.
        num_threads: the number of threads that compute.
        activation_dtype, uses_tiles: as for `Products`.
    """

    def __init__(
        self, most_rows: int, num_threads: int, activation_dtype: str, uses_tiles: bool
    ) -> None:
        self._most_rows = -(-most_rows // BLOCK_ROWS) * BLOCK_ROWS
        self._program = KernelProgram(num_threads)
        self._num_rows = np.zeros(1, np.int64)
        self._arithmetic = activation_dtype, uses_tiles
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._recorded: dict[int, range] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [rows, out] in the dtype of x.

        Args:
            x: [rows, in].
            weight: [out, in], whose address identifies it.
            bias: [out] or None, the same each time.
        """
        source, target = self._buffer("in", x.shape[1]), self._buffer("out", len(weight))
        place = weight.data_ptr()
        if place not in self._recorded:
            self._recorded[place] = self._record(source, _Dense(weight, bias), target)
        count = self._num_rows[0] = len(x)
        source[:count] = x
        self._program.replay(self._recorded[place])
        return target[:count].to(x.dtype, copy=True)

    def _buffer(self, kind: str, width: int) -> Tensor:
        if (kind, width) not in self._buffers:
            self._buffers[kind, width] = torch.empty(self._most_rows, width)
        return self._buffers[kind, width]

    def _record(self, source: Tensor, dense: _Dense, target: Tensor) -> range:
        """Record a product, which rounds its own activations: they differ in each replay."""
        dtype, begin = self._arithmetic[0], len(self._program)
        size = self._most_rows * row_bytes(source.shape[1], dtype)
        if ("rounded", size) not in self._buffers:
            self._buffers["rounded", size] = torch.empty(size, dtype=torch.uint8)
        rounded = self._buffers["rounded", size]
        products = Products(self._program, rounded, *self._arithmetic)
        products.record(self._num_rows.ctypes.data, source, dense, target)
        return range(begin, len(self._program))
