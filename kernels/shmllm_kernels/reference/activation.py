"""The gated activation of the decoder's MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns SwiGLU's product ``silu(gate) * up``.

    Args:
        gate_up: [..., 2 * dim], the gate in the first half and up in the second.

    Returns:
        [..., dim], contiguous, in gate_up's dtype.
    """
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
