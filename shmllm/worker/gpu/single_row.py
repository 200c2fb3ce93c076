"""Products of steps of one token, which kernels compute together with their neighbours.

This module owns which kernel takes which matrix. It must not know what the products are for.
"""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import Linear, Norm
from shmllm.models.matrices import Matrix, MixedMatrix
from shmllm.worker.gpu.products import rows_of
from shmllm_kernels.gpu.single_row import Activation, RowNorm, config_of, multiply_row


def is_whole(matrix: Matrix) -> bool:
    """Return whether a kernel takes a matrix: all of its rows have one format."""
    return not isinstance(matrix, MixedMatrix)


class SingleRowProducts:
    """Launches products of one row.

    Args:
        is_dependent: whether launches begin before those before them have ended.
    """

    def __init__(self, is_dependent: bool) -> None:
        self._is_dependent = is_dependent

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
            linear: the weights, of one format.
            norm: an RMSNorm of ``x``, or None.
            activation: the activation of the product, or None.
            adds: whether ``scale`` times the product is added to ``out``.
            scale: that factor.
        """
        assert not isinstance(linear.weight, MixedMatrix), "one format"
        weight, before = rows_of(linear.weight), None
        if norm is not None:
            before = RowNorm(norm.weight, norm.spec.eps, norm.spec.offset)
        options = linear.bias, before, activation, adds, scale, self._is_dependent
        multiply_row(out, x, weight, config_of(weight), *options)
