"""The operations behind the layers of a decoder, on any number of rows. Each kind of device
implements them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.layers import Linear, Norm
from shmllm.models.transform import Transform


class LinearOps(Protocol):
    """The operation that layers and LM head share, for any number of rows."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns ``x @ weight.T + bias``: [rows, in] -> [rows, out]."""


class LogitsOps(LinearOps, Protocol):
    """The operations from hidden states to logits, for any number of rows."""

    def transform(self, x: Tensor, transform: Transform) -> Tensor:
        """Returns the activation of the projection of ``x``, both [rows, hidden]; its norm is
        another operation."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalises rows in place; see `Ops.add_norm`. They may be parts of wider ones if the norm
        is an RMSNorm. Returns ``x``."""

    def scale_and_cap(self, x: Tensor, scale: float, cap: float | None) -> Tensor:
        """Multiplies ``x`` by the scale, in place, and, if there is a cap, replaces each product by
        ``cap * tanh(product / cap)``. Returns ``x``."""

    def forbid_behind(self, x: Tensor, count: int) -> Tensor:
        """Makes all but the first ``count`` columns of ``x`` minus infinity, in place, whatever
        they contain. Returns ``x``."""
