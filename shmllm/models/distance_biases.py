"""Biases of scores by distance: weights, `bias_specs.DistanceBiases`, or constants,
`bias_specs.LinearBiases`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shmllm.models.arranged import SpreadColumns
from shmllm.models.bias_specs import DistanceBiases, LinearBiases


def named_biases(table: Tensor, spec: DistanceBiases) -> SpreadColumns:
    """Returns the destination of a checkpoint's tensor [buckets, heads].

    Args:
        table: [heads, distances] float32, what kernels read: by the distance from a token to a key,
            from the farthest behind it on.
        spec: what the biases are.
    """
    last = spec.num_positions - 1
    distances = torch.arange(-last, last + 1)
    return SpreadColumns(table, bucket_of(distances, spec), spec.num_buckets)


def linear_biases(spec: LinearBiases, heads: range) -> Tensor:
    """Returns what kernels read of some heads, [heads, distances] float32."""
    last = spec.num_positions - 1
    slopes = torch.tensor(_slopes(spec.num_heads, spec.steepness)[heads.start : heads.stop])
    return -slopes[:, None] * torch.arange(-last, last + 1).abs()


def _slopes(num_heads: int, steepness: int) -> list[float]:
    """Returns the factor of each head: powers of the first one, which lie between those of half as
    many heads if the number is no power of two."""
    whole = 2 ** int(math.log2(num_heads))
    found = [2 ** (-steepness * (head + 1) / whole) for head in range(whole)]
    if whole < num_heads:
        found += _slopes(2 * whole, steepness)[::2][: num_heads - whole]
    return found


def bucket_of(distances: Tensor, spec: DistanceBiases) -> Tensor:
    """Returns the bucket of each distance, in float32 as transformers does."""
    of_side = spec.num_buckets // 2 if spec.both_ways else spec.num_buckets
    exact, far = of_side // 2, distances.abs()
    steps = (far.clamp(min=1).float() / exact).log() / math.log(spec.max_distance / exact)
    wide = (exact + (steps * (of_side - exact)).long()).clamp(max=of_side - 1)
    behind = of_side * (distances > 0) if spec.both_ways else 0  # no token attends to these
    return torch.where(far < exact, far, wide) + behind
