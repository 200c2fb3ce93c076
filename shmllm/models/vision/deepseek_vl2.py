"""The tower of DeepSeek-VL2: SigLIP, and projections of squares of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.deepseek_vl2_specs import DeepseekVL2Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.tiles import Pixels, picture_of, tiles_of

_ENCODER = "vision_tower."
_IN_FILES = {
    f"{_ENCODER}embeddings.patch_embedding.": "vision.patch_embed.proj.",
    f"{_ENCODER}embeddings.position_embedding.weight": "vision.pos_embed",
    f"{_ENCODER}encoder.layers.": "vision.blocks.",
    f"{_ENCODER}post_layernorm.": "vision.norm.",
    ".layer_norm": ".norm",
    ".self_attn.out_proj.": ".attn.proj.",
    ".self_attn.": ".attn.",
}
"""What checkpoints, which have the names of timm's ViT, have in place of parts of the names of
transformers' SigLIP."""


class DeepseekVL2(Tower):
    """See `deepseek_vl2_specs.DeepseekVL2Tower`."""

    unused = ("vision.attn_pool.",)

    def __init__(self, spec: DeepseekVL2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        self._encoder = Encoder(spec.encoder, _ENCODER, self, is_joined=True)
        merged = spec.encoder.hidden_size * spec.factor**2
        widths = [merged, *[spec.inner] * (spec.depth - 1), hidden_size]
        self._projections = [
            self.make_dense(f"projector.layers.{2 * number}", widths[number + 1], widths[number])
            for number in range(spec.depth)
        ]
        self._newline = self.tensor("image_newline", hidden_size)
        self._separator = self.tensor("view_seperator", hidden_size)
        self.name_in_files(_IN_FILES)
        self.name_joined(_IN_FILES, "qkv")
        (positions,) = self.named_weights["vision.pos_embed"]
        assert isinstance(positions, Tensor), "towers are not quantized"
        self.named_weights["vision.pos_embed"] = (positions[None],)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        tiles, rows, columns = grid
        if tiles != 1 + rows * columns:
            raise ValueError(f"a grid of {rows} rows and {columns} columns has {tiles} tiles")
        found = torch.stack([self._embed(tile) for tile in tiles_of(pixels, grid)])
        whole = picture_of(found[:1], 1, 1, self._newline)
        picture = picture_of(found[1:], rows, columns, self._newline)
        return torch.cat([whole, self._separator[None], picture])

    def _embed(self, tile: Tensor) -> Tensor:
        factor, side = self._spec.factor, self._spec.encoder.side
        rest = -side % factor
        x = F.pad(self._encoder(tile).view(side, side, -1), (0, 0, 0, rest, 0, rest))
        squares = x.unflatten(1, (-1, factor)).unflatten(0, (-1, factor)).permute(0, 2, 4, 1, 3)
        x = self._projections[0](squares.flatten(2).flatten(0, 1))
        for projection in self._projections[1:]:
            x = projection(F.gelu(x))
        return x
