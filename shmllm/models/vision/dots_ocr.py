"""The tower of dots.ocr: an encoder for images of any size with RMSNorms, the first one of patches,
and the projections of squares that Qwen 2 VL has."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.dots_ocr_specs import DotsOcrTower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.qwen_layers import EPS, GatedLayer
from shmllm.models.vision.squares import Rotation, embed_patches

_PATCHES = "vision_tower.patch_embed.patchifier."
_PROJECTIONS = ("fc1", "fc3", "fc2")


class DotsOcr(Tower):
    """See `dots_ocr_specs.DotsOcrTower`."""

    def __init__(self, spec: DotsOcrTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size = spec.hidden_size, spec.patch_size
        self._patches = self.make_dense(f"{_PATCHES}proj", width, 3, size, size)
        self._first_norm = self.make_rms_norm(f"{_PATCHES}norm", width, spec.eps)
        self._layers = [
            GatedLayer(
                spec,
                f"vision_tower.blocks.{layer}",
                self,
                projections=_PROJECTIONS,
                eps=spec.eps,
                bias=spec.bias,
            )
            for layer in range(spec.num_layers)
        ]
        self._last_norm = (
            self.make_rms_norm("vision_tower.post_trunk_norm", width, spec.eps)
            if spec.has_last_norm
            else None
        )
        merged = width * spec.merge_size**2
        self._norm = self.make_layer_norm("vision_tower.merger.ln_q", width, EPS)
        self._up = self.make_dense("vision_tower.merger.mlp.0", merged, merged)
        self._down = self.make_dense("vision_tower.merger.mlp.2", hidden_size, merged)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        x = self._first_norm(embed_patches(pixels, grid, spec, self._patches))
        rotation = Rotation(grid, spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation, [])
        if self._last_norm is not None:
            x = self._last_norm(x)
        squares = self._norm(x).view(-1, self._up.weight.shape[1])
        return self._down(F.gelu(self._up(squares)))
