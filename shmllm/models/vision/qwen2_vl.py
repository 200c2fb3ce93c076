"""The tower of Qwen 2 VL: all patches of an image attend to one another."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.qwen_layers import EPS, PlainLayer
from shmllm.models.vision.squares import Rotation, embed_patches
from shmllm.models.vision.squares_specs import (
    Qwen2Tower,
)


class Qwen2(Tower):
    """See `specs.Qwen2Tower`."""

    def __init__(self, spec: Qwen2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size = spec.hidden_size, spec.patch_size
        self._patches = self.make_dense(
            "visual.patch_embed.proj", width, 3, spec.num_frames, size, size, bias=False
        )
        self._layers = [
            PlainLayer(spec, f"visual.blocks.{layer}", ("fc1", "fc2"), self)
            for layer in range(spec.num_layers)
        ]
        merged = width * spec.merge_size**2
        self._norm = self.make_layer_norm("visual.merger.ln_q", width, EPS)
        self._up = self.make_dense("visual.merger.mlp.0", merged, merged)
        self._down = self.make_dense("visual.merger.mlp.2", hidden_size, merged)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        x = embed_patches(pixels, grid, self._spec, self._patches)
        rotation = Rotation(grid, self._spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation)
        squares = self._norm(x).view(-1, self._up.weight.shape[1])
        return self._down(F.gelu(self._up(squares)))
