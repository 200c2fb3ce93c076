"""SigLIP 2 for images of any size (Tschannen et al., 2025), whose table of positions is resized, as
an encoder and as the tower of a model of images and texts."""

from __future__ import annotations

from math import isqrt

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import EncoderLayer
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.pooled import ENCODER, Probe
from shmllm.models.vision.siglip2_specs import PooledSiglip2Tower, Siglip2Tower
from shmllm.models.vision.squares import in_squares, patches_in_squares


class Siglip2Encoder:
    """The encoder.

    Args:
        spec: what it computes.
        prefix: of its weights' names, with a dot.
        tower: owns the weights.
    """

    def __init__(self, spec: Siglip2Tower, prefix: str, tower: Tower) -> None:
        self._spec = spec
        width, at = spec.hidden_size, f"{prefix}embeddings."
        self._patches = tower.make_dense(f"{at}patch_embedding", width, 3 * spec.patch_size**2)
        self._positions = tower.tensor(f"{at}position_embedding.weight", spec.num_positions, width)
        self._layers = [
            EncoderLayer(spec, f"{prefix}encoder.layers.{layer}", tower)
            for layer in range(spec.num_layers)
        ]
        self._norm = tower.make_layer_norm(f"{prefix}post_layernorm", width, spec.eps)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Computes the features of an image, [patches, width], square by square; see
        `patches_in_squares`."""
        patches = patches_in_squares(pixels, grid, self._spec)[:, :, 0]
        of_pixels = patches.permute(0, 2, 3, 1).flatten(1)  # the colours of a pixel are neighbours
        x = self._patches(of_pixels.to(self._positions.dtype)) + self._resized(grid)
        for layer in self._layers:
            x = layer(x)
        return self._norm(x)

    def _resized(self, grid: Grid) -> Tensor:
        """Returns the position embeddings [patches, width] of an image, square by square: those of
        a square table that is resized to it, as an image would be, in float32."""
        side = isqrt(self._spec.num_positions)
        table = self._positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        found = F.interpolate(table, grid[1:], mode="bilinear", antialias=True)
        squares = in_squares(found[0].permute(1, 2, 0), self._spec.merge_size)
        return squares.to(self._positions.dtype)


class PooledSiglip2(Tower):
    """See `siglip2_specs.PooledSiglip2Tower`."""

    def __init__(self, spec: PooledSiglip2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._encoder = Siglip2Encoder(spec, ENCODER, self)
        self._probe = Probe(spec, f"{ENCODER}head.", self)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        return self._probe(self._encoder(pixels, grid))
