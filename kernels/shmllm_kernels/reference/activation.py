"""The gated activations of the decoder's MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product: ``silu(gate) * up``.

    Args:
        gate_up: [..., 2 * dim], the gate in the first half and up in the second.

    Returns:
        [..., dim], contiguous, in gate_up's dtype.
    """
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """GeGLU's product: ``gelu(gate) * up``.

    Args:
        gate_up: as for :func:`silu_and_mul`.
        approximate: "tanh", or "none" for the error function, as in ``torch.nn.functional.gelu``.

    Returns:
        [..., dim], contiguous, in gate_up's dtype.
    """
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate=approximate).mul_(up)
