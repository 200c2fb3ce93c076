"""The layers that the towers of Qwen 2 VL and Qwen 3 VL share."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.squares import Rotation, attend_within
from shmllm.models.vision.squares_specs import (
    SquaresTower,
)

EPS = 1e-6
"""Of all norms of these towers."""


class PlainLayer:
    """Attention to the whole image and an MLP of two projections, each behind a LayerNorm.

    Args:
        spec: what the tower computes.
        prefix: of the weights' names, such as "visual.blocks.0".
        projections: the ends of the names of the MLP's projections.
        tower: owns the weights.
    """

    def __init__(
        self, spec: SquaresTower, prefix: str, projections: tuple[str, str], tower: Tower
    ) -> None:
        width = spec.hidden_size
        up, down = projections
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}.norm{number}", width, EPS) for number in (1, 2)
        ]
        self._qkv = tower.make_dense(f"{prefix}.attn.qkv", 3 * width, width)
        self._out = tower.make_dense(f"{prefix}.attn.proj", width, width)
        self._up = tower.make_dense(f"{prefix}.mlp.{up}", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.mlp.{down}", width, spec.inner)

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        qkv = self._qkv(self._norms[0](x))
        x = x + self._out(attend_within(qkv, self._heads, rotation, []))
        return x + self._down(self._activation(self._up(self._norms[1](x))))
