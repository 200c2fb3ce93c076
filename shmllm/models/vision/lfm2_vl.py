"""The tower of LFM2-VL: SigLIP 2 for images of any size (Tschannen et al., 2025), whose table of
positions is resized, and two projections of squares of patches."""

from __future__ import annotations

from math import isqrt

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.encoder import EncoderLayer
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import in_squares, patches_in_squares
from shmllm.models.vision.squares_specs import Lfm2VlTower

_ENCODER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_PROJECTOR_EPS = 1e-5


class Lfm2Vl(Tower):
    """See `specs.Lfm2VlTower`."""

    unused = (f"{_ENCODER}head.",)

    def __init__(self, spec: Lfm2VlTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, at = spec.hidden_size, f"{_ENCODER}embeddings."
        self._patches = self.make_dense(f"{at}patch_embedding", width, 3 * spec.patch_size**2)
        self._positions = self.tensor(f"{at}position_embedding.weight", spec.num_positions, width)
        self._layers = [
            EncoderLayer(spec, f"{_ENCODER}encoder.layers.{layer}", self)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{_ENCODER}post_layernorm", width, spec.eps)
        merged, inner, bias = width * spec.merge_size**2, spec.projector_inner, spec.projector_bias
        self._square_norm = (
            self.make_layer_norm(f"{_PROJECTOR}layer_norm", merged, _PROJECTOR_EPS)
            if spec.projector_norm
            else None
        )
        self._up = self.make_dense(f"{_PROJECTOR}linear_1", inner, merged, bias=bias)
        self._down = self.make_dense(f"{_PROJECTOR}linear_2", hidden_size, inner, bias=bias)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        patches = patches_in_squares(pixels, grid, self._spec)[:, :, 0]
        of_pixels = patches.permute(0, 2, 3, 1).flatten(1)  # the colours of a pixel are neighbours
        x = self._patches(of_pixels.to(self.dtype)) + self._resized(grid)
        for layer in self._layers:
            x = layer(x)
        squares = self._norm(x).unflatten(0, (-1, self._spec.merge_size**2)).flatten(1)
        if self._square_norm is not None:
            squares = self._square_norm(squares)
        return self._down(ACTIVATIONS[self._spec.projector_activation](self._up(squares)))

    def _resized(self, grid: Grid) -> Tensor:
        """Returns the position embeddings [patches, width] of an image, square by square: those of
        a square table that is resized to it, as an image would be, in float32."""
        side = isqrt(self._spec.num_positions)
        table = self._positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        found = F.interpolate(table, grid[1:], mode="bilinear", antialias=True)
        return in_squares(found[0].permute(1, 2, 0), self._spec.merge_size).to(self.dtype)
