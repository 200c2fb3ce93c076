"""The weights of biases by distance, `mixer_specs.DistanceBiases`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shmllm.models.arranged import SpreadColumns
from shmllm.models.mixer_specs import DistanceBiases


def named_biases(table: Tensor, spec: DistanceBiases) -> SpreadColumns:
    """Returns the destination of a checkpoint's tensor [buckets, heads].

    Args:
        table: [heads, distances] float32, what kernels read: by the distance from a token to a key,
            from the farthest behind it on.
        spec: what the biases are.
    """
    last = spec.num_positions - 1
    distances = torch.arange(-last, last + 1)
    return SpreadColumns(table, _bucket(distances, spec), spec.num_buckets)


def _bucket(distances: Tensor, spec: DistanceBiases) -> Tensor:
    """Returns the bucket of each distance, in float32 as transformers does."""
    of_side = spec.num_buckets // 2
    exact, far = of_side // 2, distances.abs()
    steps = (far.clamp(min=1).float() / exact).log() / math.log(spec.max_distance / exact)
    wide = (exact + (steps * (of_side - exact)).long()).clamp(max=of_side - 1)
    return torch.where(far < exact, far, wide) + of_side * (distances > 0)
