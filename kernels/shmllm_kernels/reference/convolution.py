"""The causal convolution of each channel before a recurrent layer, for the tokens of one
request."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(
    x: Tensor, weights: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns ``silu`` of the causal convolution of each channel, and the state behind it.

    Args:
        x: [tokens, channels].
        weights: [taps, channels].
        bias: [channels], or None.
        state: [taps - 1, channels] float32, the inputs before, the oldest first.
    """
    inputs = torch.cat([state, x.float()])
    windows = inputs.unfold(0, len(weights), 1)  # [tokens, channels, taps]
    out = (windows * weights.float().T).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return F.silu(out).to(x.dtype), inputs[len(x) :]
