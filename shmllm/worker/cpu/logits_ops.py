"""The operations behind the layers of a decoder on a CPU, recorded as those of `ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Linear, Norm
from shmllm.models.transform import Transform
from shmllm.worker.cpu.group import Meetings
from shmllm.worker.cpu.norms import record_norm
from shmllm.worker.cpu.products import Products
from shmllm.worker.group import Alone
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.rows import ACTIVATE, FORBID_BEHIND, SCALE_AND_CAP


class CpuLogitsOps:
    """Records the operations of `models.logits_ops.LogitsOps` in a kernel program.

    Args:
        program: the program to record in.
        products: records matrix products there.
        num_rows: the address of an int64, the number of rows to compute.
        logits: [rows, vocab] float32, the result.
        own_tokens: the tokens of which this process has the rows of the LM head.
        meetings: where the ranks of a group meet; None: the process is alone.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        num_rows: int,
        logits: Tensor,
        own_tokens: range | None = None,
        meetings: Meetings | None = None,
    ) -> None:
        self._kernels = program
        self._products = products
        self._num_rows = num_rows
        self._logits = logits
        tokens = own_tokens or range(logits.shape[1])
        self._own = logits[:, tokens.start : tokens.stop]
        self._meetings = meetings or Meetings(program, "", Alone())

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        self._products.record(self._num_rows, x, linear, self._own)
        if self._meetings.are_needed:
            self._meetings.gather()
        return self._logits

    def transform(self, x: Tensor, transform: Transform) -> Tensor:
        out = torch.zeros_like(x)
        self._products.record(self._num_rows, x, transform.dense, out)
        operands = [self._num_rows, out.data_ptr(), out.data_ptr(), out.shape[1]]
        kernel = ACTIVATE[transform.spec.activation, False]
        self._kernels.record(kernel, operands, keep=[out], label=transform.spec.activation)
        return out

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        record_norm(self._kernels, self._num_rows, None, x, norm, x)
        return x

    def scale_and_cap(self, x: Tensor, scale: float, cap: float | None) -> Tensor:
        if not self._meetings.has_rest:
            return x
        numbers = [word_of_float(number) for number in (scale, cap or 0.0)]
        operands = [self._num_rows, x.data_ptr(), x.shape[1], *numbers]
        self._kernels.record(SCALE_AND_CAP, operands, label="scale_and_cap")
        return x

    def forbid_behind(self, x: Tensor, count: int) -> Tensor:
        if self._meetings.has_rest:
            operands = [self._num_rows, x.data_ptr(), x.shape[1], count]
            self._kernels.record(FORBID_BEHIND, operands, label="forbid_behind")
        return x
