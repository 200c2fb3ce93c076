"""Products of steps of one token, which a kernel computes together with their neighbours.

This module owns which matrices that kernel takes. It must not know what the products are for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Linear, Norm
from shmllm.models.matrices import Matrix
from shmllm_kernels.gpu.configs import has_dependent_launches, single_row_config
from shmllm_kernels.gpu.single_row import Activation, RowNorm, multiply_row


def is_plain(matrix: Matrix) -> bool:
    """Return whether the kernel takes a matrix: it is not packed."""
    return isinstance(matrix, Tensor)


class SingleRowProducts:
    """Launches products of one row.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_dependent = has_dependent_launches(device)

    def linear(self, out: Tensor, x: Tensor, linear: Linear) -> None:
        """Compute ``out = x @ weight.T + bias``."""
        self.multiply(out, x, linear)

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        linear: Linear,
        norm: Norm | None = None,
        activation: Activation | None = None,
        adds: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Compute ``norm(x) @ weight.T + bias`` and what follows; see `multiply_row`.

        Args:
            out: [1, out], or [1, out / 2] for a gated activation.
            x: [1, in].
            linear: the weights, which are plain.
            norm: an RMSNorm of ``x``, or None.
            activation: the activation of the product, or None.
            adds: whether ``scale`` times the product is added to ``out``.
            scale: that factor.
        """
        weight = linear.weight
        assert isinstance(weight, Tensor), "a plain matrix"
        before = None
        if norm is not None:
            before = RowNorm(norm.weight, norm.spec.eps, norm.spec.offset)
        multiply_row(
            out,
            x,
            weight,
            single_row_config(*weight.shape),
            linear.bias,
            before,
            activation,
            adds,
            scale,
            self._is_dependent,
        )
