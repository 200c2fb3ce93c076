"""The tower of MiniMax M3: CLIP's encoder for images of any size, which rotates parts of queries
and keys, and projections of patches and of squares of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.minimax_m3_specs import MiniMaxM3Tower
from shmllm.models.vision.rotated_layer import RotatedLayer
from shmllm.models.vision.squares import Rotation, embed_patches, places_in_squares

_IN_MODULES = {
    "vision_tower.encoder.layers.": "vision_tower.layers.",
    ".patch_embedding.": ".proj.",
    "patch_merge_mlp.": "multi_modal_projector.merge_",
}


class _PartRotation(Rotation):
    """The rotation of the first elements of heads by time, which is 0 in an image, rows and
    columns; each axis has the same frequencies (`MiniMaxM3VLVisionRotaryEmbedding` of
    transformers)."""

    def __init__(self, grid: Grid, spec: MiniMaxM3Tower, device: torch.device) -> None:
        count = spec.num_axis_pairs
        exponents = torch.arange(count, dtype=torch.float32, device=device) / count
        places = F.pad(places_in_squares(grid, spec.merge_size, device), (1, 0))
        angles = (places[..., None].float() / spec.theta**exponents).flatten(1)[:, None]
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        size = 2 * self._cos.shape[2]
        return torch.cat([super().__call__(x[..., :size]), x[..., size:]], -1)


class MiniMaxM3(Tower):
    """See `minimax_m3_specs.MiniMaxM3Tower`."""

    def __init__(self, spec: MiniMaxM3Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size, inner = spec.hidden_size, spec.patch_size, spec.projected
        self._patches = self.make_dense(
            "vision_tower.embeddings.patch_embedding",
            *(width, 3, spec.num_frames, size, size),
            bias=False,
        )
        self._norm = self.make_layer_norm("vision_tower.pre_layrnorm", width, spec.eps)
        self._layers = [
            RotatedLayer(spec, f"vision_tower.encoder.layers.{layer}", spec.eps, self)
            for layer in range(spec.num_layers)
        ]
        merged = hidden_size * spec.merge_size**2
        self._projections = [
            (
                self.make_dense(f"{name}.linear_1", inner, read),
                self.make_dense(f"{name}.linear_2", hidden_size, inner),
            )
            for name, read in (("multi_modal_projector", width), ("patch_merge_mlp", merged))
        ]
        self.name_as_modules(_IN_MODULES)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        x = self._norm(embed_patches(pixels, grid, spec, self._patches))
        rotation = _PartRotation(grid, spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation, [])
        for up, down in self._projections:
            x = down(F.gelu(up(x.view(-1, up.weight.shape[1]))))
        return x
