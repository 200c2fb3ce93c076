"""The operations behind a model's logits on a GPU.

This module owns where logits are written, and how the ranks of a group put their parts together. It
must not know the layers in front of the logits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shmllm.models.layers import Linear, Norm
from shmllm.models.transform import Transform
from shmllm.worker.gpu.group import NoMeetings
from shmllm_kernels.gpu.activation import activate
from shmllm_kernels.gpu.norm import layer_norm, rms_norm


class Products(Protocol):
    """Launches matrix products."""

    def linear(self, out: Tensor, x: Tensor, linear: Linear) -> None:
        """Compute ``out = x @ weight.T + bias``."""


class GpuLogitsOps:
    """Launches the operations of `models.logits_ops.LogitsOps`.

    Args:
        logits: [rows, vocab], the result; rank 0 of a group has it.
        products: launches matrix products.
        meetings: launches the meetings of the ranks of a group; None: the process is alone.
        transformed: [rows, hidden], memory for the result of `transform`; None: it takes some.
        exact: [rows, hidden] float32, memory for what an LM head in float32 reads of hidden states
            that are not; None: it takes some.
    """

    def __init__(
        self,
        logits: Tensor,
        products: Products,
        meetings: NoMeetings | None = None,
        transformed: Tensor | None = None,
        exact: Tensor | None = None,
    ) -> None:
        self._logits = logits
        self._products = products
        self._meetings = meetings or NoMeetings()
        self._transformed = transformed
        self._exact = exact

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        if x.dtype != self._logits.dtype:
            x = x.float() if self._exact is None else self._exact.copy_(x)
        self._products.linear(self._meetings.logits(self._logits), x, linear)
        self._meetings.gather(self._logits)
        return self._logits

    def transform(self, x: Tensor, transform: Transform) -> Tensor:
        out = x.new_empty(x.shape) if self._transformed is None else self._transformed
        self._products.linear(out, x, transform.dense)
        activate(out, out, transform.spec.activation, is_gated=False)
        return out

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        spec = norm.spec
        if spec.kind == "layer":
            layer_norm(x, x, norm.weight, norm.bias, spec.eps, offset=spec.offset)
        else:
            rms_norm(x, x, norm.weight, spec.eps, spec.offset)
        return x

    def scale_and_cap(self, x: Tensor, scale: float, cap: float | None) -> Tensor:
        if not self._meetings.has_rest:
            return x
        if scale != 1:
            x.mul_(scale)
        return x if cap is None else x.div_(cap).tanh_().mul_(cap)

    def forbid_behind(self, x: Tensor, count: int) -> Tensor:
        if self._meetings.has_rest:
            x[:, count:].fill_(-torch.inf)
        return x
