"""The causal convolution of each channel, before a recurrent layer or with gates, for the tokens of
one request."""

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
    out, behind = _convolve(x, weights, bias, state)
    return F.silu(out).to(x.dtype), behind


def convolve_gated(
    x: Tensor, weights: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [tokens, channels] of a gated short convolution (Liquid AI, "LFM2
    Technical Report", 2025, section 2), and the state behind them. Gated inputs and convolutions
    are rounded to x's dtype.

    Args:
        x: [tokens, 3 * channels], input gates, output gates and inputs.
        weights: [taps, channels].
        bias: [channels], or None.
        state: [taps - 1, channels] float32, the gated inputs before, the oldest first.
    """
    before, behind, inputs = x.chunk(3, 1)
    out, state = _convolve(before * inputs, weights, bias, state)
    return behind * out.to(x.dtype), state


def convolve_gated_ahead(x: Tensor, weights: Tensor, bias: Tensor | None, ahead: int) -> Tensor:
    """Returns the outputs of `convolve_gated` for all tokens of a request, whose convolutions also
    read so many tokens behind their own."""
    before, behind, inputs = x.chunk(3, 1)
    zeros = x.new_zeros(len(weights) - 1, inputs.shape[1], dtype=torch.float32)
    padded = torch.cat([before * inputs, zeros[:ahead].to(x.dtype)])
    out, _ = _convolve(padded, weights, bias, zeros)
    return behind * out[ahead:].to(x.dtype)


def _convolve(
    x: Tensor, weights: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    inputs = torch.cat([state, x.float()])
    windows = inputs.unfold(0, len(weights), 1)  # [tokens, channels, taps]
    out = (windows * weights.float().T).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out, inputs[len(x) :]
