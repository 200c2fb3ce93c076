"""The head behind pooling on a GPU, with torch's operations in float32.

This module owns how many rows are computed at once. It must not know what is pooled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.decoder import DecoderModel
from shmllm.models.head_specs import HeadActivation
from shmllm.models.heads import Head
from shmllm.models.layers import Linear, Norm
from shmllm.models.model import Model
from shmllm.worker.gpu.device import Device
from shmllm_kernels.reference.activation import activate
from shmllm_kernels.reference.norm import layer_norm, rms_norm

ROWS_AT_ONCE = 64
"""Products have this many rows, so that the bits of a row do not depend on the number of others."""

_OF_HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class GpuHead:
    """Computes a head beside the device's other work, because its rows come from the host, which
    has sent the next step by then.

    Args:
        head: the weights.
        device: the device.
    """

    def __init__(self, head: Head, device: Device) -> None:
        self._head = head
        self._device = device
        self._ops = _HeadOps()

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        """Compute the results of rows, and wait for them.

        Args:
            rows: [rows, hidden] float32, on the host; at least one.

        Returns:
            [rows, width] float32, on the host.
        """
        num_missing = -len(rows) % ROWS_AT_ONCE
        with self._device.beside():
            x = F.pad(rows, (0, 0, 0, num_missing)).to(self._device.torch_device)
            parts = [self._head(self._ops, part) for part in x.split(ROWS_AT_ONCE)]
            return torch.cat(parts)[: len(rows)].cpu()


def make_head(model: Model, device: Device) -> GpuHead | None:
    """Make what computes the head behind pooling; None: the model has none."""
    if not isinstance(model, DecoderModel) or model.head is None:
        return None
    return GpuHead(model.head, device)


class _HeadOps:
    """The operations of `models.heads.HeadOps`."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        weight, bias = linear.weight, linear.bias
        assert isinstance(weight, Tensor), "the weights of heads are not packed"
        return F.linear(x, weight.float(), None if bias is None else bias.float())

    def activate_rows(self, x: Tensor, activation: HeadActivation) -> Tensor:
        function = _OF_HEADS.get(activation)
        return activate(x, activation, is_gated=False) if function is None else function(x)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        spec, weight = norm.spec, norm.weight.float()
        if spec.kind == "layer":
            return layer_norm(x, weight, norm.bias, spec.eps, spec.offset)
        return rms_norm(x, weight, spec.eps, spec.offset)
