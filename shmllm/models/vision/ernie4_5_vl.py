"""The tower of ERNIE 4.5 VL: all patches of an image attend to one another, and two MLPs, each with
a norm, make one embedding of a square of patches of two frames. An image is two equal frames."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.ernie4_5_vl_specs import NUM_FRAMES, Ernie45VLTower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.qwen_layers import PlainLayer
from shmllm.models.vision.squares import Rotation, embed_patches

_IN_MODULES = {
    "vision_model.": "vision_tower.",
    **{
        f"{kind}_linear.{number}.": f"{kind}_linear.{name}."
        for kind in ("spatial", "temporal")
        for number, name in (("0", "fc1"), ("2", "fc2"), ("3", "ln"))
    },
}


class Ernie45VL(Tower):
    """See `ernie4_5_vl_specs.Ernie45VLTower`."""

    def __init__(self, spec: Ernie45VLTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size = spec.hidden_size, spec.patch_size
        self._patches = self.make_dense(
            "vision_model.patch_embed.proj", width, 3 * size**2, bias=False
        )
        self._layers = [
            PlainLayer(spec, f"vision_model.blocks.{layer}", ("fc1", "fc2"), self, spec.eps)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm("vision_model.ln", width, spec.eps)
        square = width * spec.merge_size**2
        self._of_square = _Resampler("spatial", square, square, spec.eps, self)
        self._of_frames = _Resampler("temporal", NUM_FRAMES * square, square, spec.eps, self)
        self._out = self.make_dense("resampler_model.mlp", hidden_size, square)
        self._last = self.make_rms_norm("resampler_model.after_norm", hidden_size, spec.last_eps)
        self.name_as_modules(_IN_MODULES)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        x = embed_patches(pixels, grid, self._spec, self._patches)
        rotation = Rotation(grid, self._spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation)
        squares = self._of_square(self._norm(x).view(-1, self._out.weight.shape[1]))
        frames = self._of_frames(torch.cat([squares] * NUM_FRAMES, -1))
        return self._last(self._out(frames))


class _Resampler:
    """Two projections with a GELU between them, and a LayerNorm.

    Args:
        kind: the beginning of the weights' names behind "resampler_model.".
        inputs, outputs: the widths.
        eps: of the norm.
        tower: owns the weights.
    """

    def __init__(self, kind: str, inputs: int, outputs: int, eps: float, tower: Tower) -> None:
        prefix = f"resampler_model.{kind}_linear"
        self._up = tower.make_dense(f"{prefix}.0", outputs, inputs)
        self._down = tower.make_dense(f"{prefix}.2", outputs, outputs)
        self._norm = tower.make_layer_norm(f"{prefix}.3", outputs, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs them: [squares, inputs] -> [squares, outputs]."""
        return self._norm(self._down(F.gelu(self._up(x))))
