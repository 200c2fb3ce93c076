"""Convolutions as products with windows: torch's own may depend on the number of threads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.tower import Dense

KERNEL = 3
"""Their length, in frames, and in features."""


def convolve(dense: Dense, x: Tensor, stride: int) -> Tensor:
    """Returns the convolution over frames, [..., frames, in] -> [..., frames / stride, out]."""
    windows = F.pad(x, (0, 0, 1, 1)).unfold(-2, KERNEL, stride)  # [..., frames, in, kernel]
    rows: Tensor = dense(windows.flatten(0, -3).flatten(1))
    return rows.view(*windows.shape[:-2], -1)


def convolve_windows(dense: Dense, x: Tensor, length: int, stride: int) -> Tensor:
    """Returns the convolution over whole windows, [n, in] -> [windows, out]."""
    return dense(x.unfold(0, length, stride).flatten(1))


def convolve_plane(dense: Dense, x: Tensor, stride: int = 2) -> Tensor:
    """Returns the convolution over frames and features, or over rows and columns, [n, in, rows,
    columns] -> [n, rows / stride, columns / stride, out]."""
    windows = F.pad(x, (1, 1, 1, 1)).unfold(2, KERNEL, stride).unfold(3, KERNEL, stride)
    rows = windows.permute(0, 2, 3, 1, 4, 5).flatten(3)
    out: Tensor = dense(rows.flatten(0, 2))
    return out.view(*rows.shape[:3], -1)


def convolve_columns(x: Tensor, kernel: Tensor) -> Tensor:
    """Returns the convolution of each column over rows, [rows + size - 1, width] -> [rows, width].

    Args:
        x: the rows, and those around them that the first and the last one read.
        kernel: [width, 1, size].
    """
    rows = len(x) - kernel.shape[-1] + 1
    out = torch.zeros_like(x[:rows])
    for place, factors in enumerate(kernel[:, 0].T):
        out = out + x[place : place + rows] * factors
    return out
