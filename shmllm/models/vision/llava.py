"""The tower of LLaVA: CLIP or SigLIP and two projections."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.specs import Grid, LlavaTower
from shmllm.models.vision.tiles import tiles_of

ENCODER, PROJECTOR = "vision_tower.", "multi_modal_projector."


class Llava(Tower):
    """See `specs.LlavaTower`."""

    def __init__(self, spec: LlavaTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        self._encoder = Encoder(spec.encoder, ENCODER, self)
        width = spec.encoder.hidden_size
        self._first = self.make_dense(f"{PROJECTOR}linear_1", hidden_size, width, bias=spec.bias)
        self._second = self.make_dense(
            f"{PROJECTOR}linear_2", hidden_size, hidden_size, bias=spec.bias
        )
        self.unused = (
            f"{ENCODER}post_layernorm.",
            f"{ENCODER}head.",
            *(
                f"{ENCODER}encoder.layers.{layer}."
                for layer in range(spec.encoder.num_layers, spec.num_stored)
            ),
        )

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        x = self._encoder(tile)
        x = self._first(x[1:] if self._spec.drops_first else x)
        return self._second(ACTIVATIONS[self._spec.activation](x))
