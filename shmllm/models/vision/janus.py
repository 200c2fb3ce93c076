"""The tower of Janus: SigLIP, and projections of its results with activations between them."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.specs import JanusTower
from shmllm.models.vision.tiles import Pixels, tiles_of


class Janus(Tower):
    """See `specs.JanusTower`."""

    def __init__(self, spec: JanusTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._encoder = Encoder(spec.encoder, "vision_model.", self)
        self.named_weights = {
            name.replace(".out_proj.", ".projection_layer."): views
            for name, views in self.named_weights.items()
        }
        self._activation = ACTIVATIONS[spec.encoder.activation]
        self._first = self.make_dense("aligner.fc1", hidden_size, spec.encoder.hidden_size)
        self._others = [
            self.make_dense(f"aligner.hidden_layers.{index}", hidden_size, hidden_size)
            for index in range(spec.depth - 1)
        ]

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        x = self._first(self._encoder(tile))
        for dense in self._others:
            x = dense(self._activation(x))
        return x
