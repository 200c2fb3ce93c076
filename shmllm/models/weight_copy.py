"""Copies weights to where the model has them, with all cores.

Owns how that is fast. Must not know names, or whether the values may be taken.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shmllm.models.weights import copy_weight


@torch.no_grad()
def copy_weights(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each (destination, source of the same shape and dtype)."""
    for view, tensor in pairs:
        copy_weight(view, tensor)
