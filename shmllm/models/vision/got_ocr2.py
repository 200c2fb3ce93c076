"""The tower of GOT-OCR 2: SAM's encoder for tiles of one size, and a projection behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.sam import Sam
from shmllm.models.vision.sam_specs import GotOcr2Tower
from shmllm.models.vision.tiles import Pixels, tiles_of

_PROJECTOR = "multi_modal_projector."


class GotOcr2(Tower):
    """See `sam_specs.GotOcr2Tower`."""

    def __init__(self, spec: GotOcr2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._side = spec.encoder.side
        halves = [
            (f"{_PROJECTOR}conv_upsampler1", 2 * spec.neck),
            (f"{_PROJECTOR}conv_upsampler2", hidden_size),
        ]
        self._encoder = Sam(spec, "vision_tower.", halves, self)
        self._out = self.make_dense(f"{_PROJECTOR}multimodal_projector", hidden_size, hidden_size)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        tiles = tiles_of(pixels, grid)
        return torch.cat([self._out(self._encoder(tile, self._side)) for tile in tiles])
