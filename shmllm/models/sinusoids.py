"""Sinusoids of positions (Vaswani et al., 2017, section 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shmllm.models.sinusoid_kinds import SinusoidKind

_LONGEST = 10_000.0
"""The ratio of the longest wavelength to the shortest."""


def sinusoids(
    count: int,
    width: int,
    device: torch.device | None = None,
    *,
    first: int = 0,
    kind: SinusoidKind = "fairseq",
) -> Tensor:
    """Returns position embeddings, [count, width] float32: sines of wavelengths that grow, and
    their cosines behind them.

    Args:
        count: the number of positions.
        width: that of an embedding, an even number.
        device: where they are made.
        first: the first position.
        kind: see `SinusoidKind`; all but fairseq's are computed in float64.
    """
    num_rates = width // 2
    dtype = torch.float32 if kind == "fairseq" else torch.float64
    step = math.log(_LONGEST) / (num_rates - 1 if kind == "fairseq" else num_rates)
    rates = torch.exp(-step * torch.arange(num_rates, device=device).to(dtype))
    angles = torch.arange(first, first + count, device=device)[:, None] * rates
    scale = width**-0.5 if kind == "nemo" else 1.0
    return torch.cat([angles.sin() * scale, angles.cos() * scale], 1).float()
