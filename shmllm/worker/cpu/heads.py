"""The head behind pooling on a CPU, recorded as a kernel program of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shmllm.models.head_specs import HeadActivation
from shmllm.models.heads import Head
from shmllm.models.layers import Linear, Norm
from shmllm.worker.cpu.norms import record_norm
from shmllm.worker.cpu.products import Products
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.rows import ACTIVATE

ROWS_AT_ONCE = 64


class CpuHead:
    """Computes a head in float32. The bits of a row do not depend on the others.

    Args:
        head: the weights, whose addresses must not change.
        hidden_size: the width of a hidden state.
        num_threads: the number of threads that compute.
    """

    def __init__(self, head: Head, hidden_size: int, num_threads: int) -> None:
        self._num_rows = np.zeros(1, np.int64)
        self._program = KernelProgram(num_threads)
        self._ops = _HeadOps(self._program, int(self._num_rows.ctypes.data))
        self._rows = torch.zeros(ROWS_AT_ONCE, hidden_size)
        self._results = head(self._ops, self._rows)

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute the results, [rows, width] float32, of rows, [rows, hidden] float32."""
        results = rows.new_empty(len(rows), self._results.shape[1])
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[begin : begin + ROWS_AT_ONCE]
            self._num_rows[0] = len(part)
            self._rows[: len(part)] = part
            self._program.replay()
            results[begin : begin + len(part)] = self._results[: len(part)]
        return results


class _HeadOps:
    """Records the operations of `models.heads.HeadOps`."""

    def __init__(self, program: KernelProgram, num_rows: int) -> None:
        self._program = program
        self._num_rows = num_rows
        self._products = Products(program, None)
        self._buffers: list[Tensor] = []  # the kernels read and write them in every replay

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        out = torch.zeros(ROWS_AT_ONCE, linear.weight.shape[0])
        self._buffers.append(out)
        self._products.record(self._num_rows, x, linear, out)
        return out

    def activate_rows(self, x: Tensor, activation: HeadActivation) -> Tensor:
        operands = [self._num_rows, x.data_ptr(), x.data_ptr(), x.shape[1]]
        self._program.record(ACTIVATE[activation, False], operands, label=activation)
        return x

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        record_norm(self._program, self._num_rows, None, x, norm, x)
        return x
