"""Weights as 8-bit integers, for decoding that waits for memory.

Owns a matrix's integers and the scale of each output channel. Must not know which matrices a
model has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 127


class Int8Weight:
    """A matrix rounded to 8 bits per channel. The matrix itself stays where it is: updates are
    written there and quantized by ``derive``.

    Args:
        weight: [out, in].
        allocate: gives the storage, a byte per element and four per output channel.

    Attributes:
        integers: [out, in] int8.
        scales: [out] float32; ``integers * scales`` is what the matrix was rounded to.
    """

    def __init__(
        self, weight: Tensor, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> None:
        self._weight = weight
        self.integers = allocate(tuple(weight.shape), torch.int8)
        self.scales = allocate((weight.shape[0],), torch.float32)

    def derive(self) -> None:
        """Round the matrix as it is now."""
        wide = self._weight.float()
        smallest = torch.finfo(torch.float32).tiny
        torch.amax(wide.abs(), 1, out=self.scales)
        self.scales.clamp_min_(smallest * LARGEST).div_(LARGEST)
        rounded = (wide / self.scales[:, None]).round_().clamp_(-LARGEST, LARGEST)
        self.integers.copy_(rounded)
