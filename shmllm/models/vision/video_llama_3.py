"""The tower of VideoLLaMA 3: SigLIP's encoder for images of any size, which rotates queries and
keys in place of a table of positions, and two projections of patches."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.rotated_layer import RotatedLayer
from shmllm.models.vision.squares import Rotation, embed_patches
from shmllm.models.vision.video_llama_3_specs import VideoLlama3Tower

_ENCODER = "vision_model."


class VideoLlama3(Tower):
    """See `video_llama_3_specs.VideoLlama3Tower`."""

    def __init__(self, spec: VideoLlama3Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size = spec.hidden_size, spec.patch_size
        self._patches = self.make_dense(
            f"{_ENCODER}embeddings.patch_embedding", width, 3, size, size
        )
        self._layers = [
            RotatedLayer(spec, f"{_ENCODER}encoder.layers.{layer}", spec.eps, self)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{_ENCODER}post_layernorm", width, spec.eps)
        self._up = self.make_dense("projector.readout.0", hidden_size, width)
        self._down = self.make_dense("projector.readout.2", hidden_size, hidden_size)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        x = embed_patches(pixels, grid, self._spec, self._patches)
        rotation = Rotation(grid, self._spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation, [])
        return self._down(F.gelu(self._up(self._norm(x))))
