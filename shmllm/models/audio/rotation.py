"""Rotations of heads by positions, which count from the begin of a sound."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotation:
    """The rotation of the first elements of heads by their positions (Su et al., 2021).

    Args:
        count: the number of positions.
        rotary_dim: the number of elements that are rotated.
        theta: the base of the wavelengths.
        like: has the device and the dtype.
        interleaved: whether neighbouring elements are rotated together, and not those of the two
            halves.
    """

    def __init__(
        self, count: int, rotary_dim: int, theta: float, like: Tensor, interleaved: bool = False
    ) -> None:
        exponents = torch.arange(0, rotary_dim, 2, device=like.device) / rotary_dim
        positions = torch.arange(count, device=like.device, dtype=torch.float32)
        angles = (positions[:, None] * (1.0 / theta**exponents))[:, None]
        self._cos, self._sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        self._interleaved = interleaved

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x`` [..., positions, heads, head_dim], rotated."""
        half = self._cos.shape[-1]
        turned, rest = x.split([2 * half, x.shape[-1] - 2 * half], -1)
        first, second = (
            (turned[..., ::2], turned[..., 1::2]) if self._interleaved else turned.chunk(2, -1)
        )
        parts = first * self._cos - second * self._sin, second * self._cos + first * self._sin
        both = torch.stack(parts, -1).flatten(-2) if self._interleaved else torch.cat(parts, -1)
        return torch.cat([both, rest], -1)
