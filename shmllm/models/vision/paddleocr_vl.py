"""The tower of PaddleOCR-VL: SigLIP's encoder for images of any size, whose table of positions is
interpolated bilinearly, and two projections of squares of patches behind it."""

from __future__ import annotations

from math import isqrt

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.rotated_layer import RotatedLayer
from shmllm.models.vision.squares import Rotation, embed_patches, interpolated
from shmllm.models.vision.squares_specs import (
    PaddleOcrVlTower,
)

_EPS = 1e-5
"""Of the norm before the projections."""
_ENCODER = "visual.vision_model."


class PaddleOcrVl(Tower):
    """See `specs.PaddleOcrVlTower`."""

    unused = (f"{_ENCODER}head.", f"{_ENCODER}embeddings.packing_position_embedding.")

    def __init__(self, spec: PaddleOcrVlTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size, merged = spec.hidden_size, spec.patch_size, spec.merged
        self._patches = self.make_dense(
            f"{_ENCODER}embeddings.patch_embedding", width, 3, size, size
        )
        self._positions = self.tensor(
            f"{_ENCODER}embeddings.position_embedding.weight", spec.num_positions, width
        )
        self._layers = [
            RotatedLayer(spec, f"{_ENCODER}encoder.layers.{layer}", spec.eps, self)
            for layer in range(spec.num_layers)
        ]
        self._last_norm = self.make_layer_norm(f"{_ENCODER}post_layernorm", width, spec.eps)
        self._norm = self.make_layer_norm("projector.pre_norm", width, _EPS)
        self._up = self.make_dense("projector.linear_1", merged, merged)
        self._down = self.make_dense("projector.linear_2", hidden_size, merged)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        x = embed_patches(pixels, grid, spec, self._patches)
        side = isqrt(spec.num_positions)
        table = self._positions.view(side, side, -1)
        x = x + interpolated(table, grid, spec.merge_size, "bilinear")
        rotation = Rotation(grid, spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation, [])
        squares = self._norm(self._last_norm(x)).view(-1, spec.merged)
        return self._down(F.gelu(self._up(squares)))
