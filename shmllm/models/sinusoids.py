"""Sinusoids of positions (Vaswani et al., 2017, section 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LONGEST = 10_000.0
"""The ratio of the longest wavelength to the shortest."""


def sinusoids(
    count: int, width: int, device: torch.device | None = None, *, first: int = 0
) -> Tensor:
    """Returns position embeddings, [count, width] float32: sines of wavelengths that grow, and
    their cosines behind them. The width is even, and the first position `first`."""
    step = math.log(_LONGEST) / (width // 2 - 1)
    rates = torch.exp(-step * torch.arange(width // 2, device=device).float())
    angles = torch.arange(first, first + count, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
