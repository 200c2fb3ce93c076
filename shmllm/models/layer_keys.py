"""What the layers of a decoder read of an encoder's results: their keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shmllm.models.tower import Tower


class LayerKeys:
    """
    Args:
        tower: owns the weights.
        num_layers: the number of the decoder's layers.
        inputs: the width of the encoder's results.
        outputs: the width of the keys of a layer, and of the values.
        name_of: returns the name of the projection to the keys ("k") or values ("v") of a layer.
        biases: which of the two have biases.
    """

    def __init__(
        self,
        tower: Tower,
        num_layers: int,
        inputs: int,
        outputs: int,
        name_of: Callable[[int, str], str],
        biases: str = "kv",
    ) -> None:
        self._projections = [
            tower.make_dense(name_of(layer, kind), outputs, inputs, bias=kind in biases)
            for layer in range(num_layers)
            for kind in "kv"
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [positions, 2 * layers * outputs], for each layer its keys, then its values, of
        ``x`` [positions, inputs]."""
        return torch.cat([project(x) for project in self._projections], 1)
