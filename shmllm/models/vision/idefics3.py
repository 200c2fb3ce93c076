"""The tower of Idefics 3 and SmolVLM: SigLIP and a projection of squares of patches."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.projected_specs import Idefics3Tower
from shmllm.models.vision.tiles import Pixels, tiles_of


class Idefics3(Tower):
    """See `specs.Idefics3Tower`."""

    unused = ("vision_model.head.",)

    def __init__(self, spec: Idefics3Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._factor = spec.factor
        self._encoder = Encoder(spec.encoder, "vision_model.", self)
        self._projection = self.make_dense(
            spec.projection,
            hidden_size,
            spec.encoder.hidden_size * spec.factor**2,
            bias=False,
        )

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        return self._projection(squares_of(self._encoder(tile), self._factor))


def squares_of(x: Tensor, factor: int) -> Tensor:
    """Returns squares of patches, each as one row of numbers.

    Args:
        x: [patches, width] of a square tile, row by row.
        factor: the side of a square, which divides that of the tile.

    Returns:
        [patches / factor**2, factor**2 * width].
    """
    side = isqrt(len(x)) // factor
    squares = x.view(side, factor, side, factor, -1).transpose(1, 2)
    return squares.reshape(side * side, -1)
