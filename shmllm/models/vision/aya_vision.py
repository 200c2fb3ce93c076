"""The tower of Aya Vision and Command A Vision: SigLIP, and two projections of squares of patches
with a gate between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.projected_specs import AyaVisionTower
from shmllm.models.vision.squares import in_squares
from shmllm.models.vision.tiles import Pixels, tiles_of

_ENCODER, _PROJECTOR = "vision_tower.", "multi_modal_projector."


class AyaVision(Tower):
    """See `specs.AyaVisionTower`."""

    def __init__(self, spec: AyaVisionTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._factor = spec.factor
        self._encoder = Encoder(spec.encoder, _ENCODER, self)
        merged = spec.encoder.hidden_size * spec.factor**2
        self._norm = (
            None
            if spec.norm_eps is None
            else self.make_layer_norm(f"{_PROJECTOR}layernorm", merged, spec.norm_eps)
        )
        self._up = self.make_dense(f"{_PROJECTOR}linear_1", 2 * spec.inner, merged)
        self._down = self.make_dense(f"{_PROJECTOR}linear_2", hidden_size, spec.inner)
        unneeded = range(spec.encoder.num_layers, spec.num_stored)
        self.unused = (
            f"{_ENCODER}head.",
            *(f"{_ENCODER}encoder.layers.{layer}." for layer in unneeded),
            *(() if spec.encoder.final_norm else (f"{_ENCODER}post_layernorm.",)),
        )

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        side, factor = self._encoder.spec.side, self._factor
        patches = in_squares(self._encoder(tile).view(side, side, -1), factor)
        squares = patches.unflatten(0, (-1, factor**2)).flatten(1)
        if self._norm is not None:
            squares = self._norm(squares)
        x, gate = self._up(squares).chunk(2, -1)
        return self._down(F.silu(gate) * x)
