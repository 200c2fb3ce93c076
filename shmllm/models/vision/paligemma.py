"""The tower of PaliGemma: SigLIP and a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.projected_specs import PaliGemmaTower
from shmllm.models.vision.tiles import Pixels, tiles_of


class PaliGemma(Tower):
    """See `specs.PaliGemmaTower`."""

    unused = ("vision_tower.head.",)

    def __init__(self, spec: PaliGemmaTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._encoder = Encoder(spec.encoder, "vision_tower.", self)
        width = spec.encoder.hidden_size
        self._projection = self.make_dense("multi_modal_projector.linear", hidden_size, width)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._projection(self._encoder(each)) for each in tiles_of(pixels, grid)])
