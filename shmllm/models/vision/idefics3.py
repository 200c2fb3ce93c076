"""The tower of Idefics 3 and SmolVLM: SigLIP and a projection of squares of patches."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.specs import Grid, Idefics3Tower
from shmllm.models.vision.tiles import Pixels, tiles_of


class Idefics3(Tower):
    """See `specs.Idefics3Tower`."""

    unused = ("vision_model.head.",)

    def __init__(self, spec: Idefics3Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._factor = spec.factor
        self._encoder = Encoder(spec.encoder, "vision_model.", self)
        self._projection = self.make_dense(
            "connector.modality_projection.proj",
            hidden_size,
            spec.encoder.hidden_size * spec.factor**2,
            bias=False,
        )

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        x = self._encoder(tile)
        factor = self._factor
        side = self._encoder.spec.side // factor
        squares = x.view(side, factor, side, factor, -1).transpose(1, 2)
        return self._projection(squares.reshape(side * side, -1))
