"""The tower of HunyuanOCR: an encoder for images of any size, whose table of positions is resized,
and projections of squares of patches, with embeddings at the ends of rows and of the image."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.encoder import EncoderLayer
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.hunyuan_vl_specs import HunYuanVLTower
from shmllm.models.vision.squares import embed_patches, interpolated

_ENCODER, _MERGER = "vision_tower.", "vision_tower.patch_merger."
_IN_FILES = {
    "vision_tower.": "vit.",
    ".mlp.fc1.": ".mlp.dense_h_to_4h.",
    ".mlp.fc2.": ".mlp.dense_4h_to_h.",
    ".layer_norm1.": ".input_layernorm.",
    ".layer_norm2.": ".post_attention_layernorm.",
    ".patch_merger.proj_conv.": ".perceive.proj.0.",
    ".patch_merger.proj_out.": ".perceive.proj.2.",
    ".patch_merger.": ".perceive.",
}
"""The names of checkpoints in place of those of transformers' modules."""


class HunYuanVL(Tower):
    """See `hunyuan_vl_specs.HunYuanVLTower`."""

    unused = "vit.perceive.image_sep", f"{_MERGER}image_sep"

    def __init__(self, spec: HunYuanVLTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size, merge = spec.hidden_size, spec.patch_size, spec.merge_size
        at = f"{_ENCODER}embeddings."
        self._patches = self.make_dense(f"{at}patch_embedding", width, 3, size, size)
        self._table = self.tensor(f"{at}position_embedding.weight", spec.table_side**2 + 1, width)
        self._layers = [
            EncoderLayer(spec, f"{_ENCODER}layers.{layer}", self)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_rms_norm(f"{_MERGER}before_rms", width, spec.eps)
        self._up = self.make_dense(f"{_MERGER}proj_conv", 2 * width, width, merge, merge)
        self._down = self.make_dense(f"{_MERGER}proj_out", 4 * width, 2 * width, 1, 1)
        self._newline = self.tensor(f"{_MERGER}image_newline", 4 * width)
        self._last = self.make_dense(f"{_MERGER}mlp", hidden_size, 4 * width)
        self._begin, self._end = (
            self.tensor(f"{_MERGER}image_{name}", hidden_size) for name in ("begin", "end")
        )
        self._last_norm = self.make_rms_norm(f"{_MERGER}after_rms", hidden_size, spec.eps)
        self.name_in_files({".out_proj.": ".o_proj."})
        self.name_in_files(_IN_FILES)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec, (_, rows, columns) = self._spec, grid
        table = self._table[1:].view(spec.table_side, spec.table_side, -1)
        x = embed_patches(pixels, grid, spec, self._patches)
        x = x + interpolated(table, grid, spec.merge_size, spec.mode)
        for layer in self._layers:
            x = layer(x)
        squares = self._norm(x).unflatten(0, (-1, spec.merge_size**2)).transpose(1, 2)
        x = self._down(ACTIVATIONS[spec.activation](self._up(squares.flatten(1))))
        picture = x.view(rows // spec.merge_size, columns // spec.merge_size, -1)
        ends = self._newline.expand(len(picture), 1, -1)
        found = self._last(torch.cat([picture, ends], 1).flatten(0, 1))
        return self._last_norm(torch.cat([self._begin[None], found, self._end[None]]))
