"""The tower of Gemma 3: SigLIP, means of squares of patches, a norm and a projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.projected_specs import Gemma3Tower
from shmllm.models.vision.tiles import Pixels, tiles_of

_PROJECTOR = "multi_modal_projector."


class Gemma3(Tower):
    """See `specs.Gemma3Tower`."""

    unused = ("vision_tower.head.",)

    def __init__(self, spec: Gemma3Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._size = spec.size
        self._encoder = Encoder(spec.encoder, "vision_tower.", self)
        width = spec.encoder.hidden_size
        self._norm = self.make_rms_norm(
            f"{_PROJECTOR}mm_soft_emb_norm", width, spec.encoder.eps, offset=1.0
        )
        self._projection = self.tensor(
            f"{_PROJECTOR}mm_input_projection_weight", width, hidden_size
        )

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        side = self._encoder.spec.side
        x = self._encoder(tile).t().reshape(1, -1, side, side)
        pooled = F.avg_pool2d(x, self._size).flatten(2)[0].t()
        return self._norm(pooled) @ self._projection
