"""The tower of DeepSeek-OCR: SAM's encoder for tiles and for the whole of an image, and CLIP, which
reads what it makes; and what its files call parts of the names of transformers' modules."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import EncoderLayer
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.sam import Sam, resized
from shmllm.models.vision.sam_specs import DeepseekOcrTower
from shmllm.models.vision.tiles import Pixels, picture_of, tiles_of

SAM = "vision_tower.sam_encoder."
PARTS_IN_FILES = {
    f"{SAM}neck.conv1.": "sam_model.neck.0.",
    f"{SAM}neck.layer_norm1.": "sam_model.neck.1.",
    f"{SAM}neck.conv2.": "sam_model.neck.2.",
    f"{SAM}neck.layer_norm2.": "sam_model.neck.3.",
    f"{SAM}proj.conv1.": "sam_model.net_2.",
    f"{SAM}proj.conv2.": "sam_model.net_3.",
    f"{SAM}patch_embed.projection.": "sam_model.patch_embed.proj.",
    f"{SAM}layers.": "sam_model.blocks.",
    f"{SAM}": "sam_model.",
    ".layer_norm": ".norm",
    "multi_modal_projector.": "projector.layers.",
    "view_separator": "view_seperator",
}
_CLIP = "vision_tower.vision_encoder."
_OF_CLIP = {f"{_CLIP}encoder.": "vision_model.transformer.", _CLIP: "vision_model."}


class DeepseekOcr(Tower):
    """See `sam_specs.DeepseekOcrTower`."""

    unused = ("vision_model.embeddings.patch_embedding.",)

    def __init__(self, spec: DeepseekOcrTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width = spec.clip.hidden_size
        halves = [(f"{SAM}proj.conv1", spec.inner), (f"{SAM}proj.conv2", width)]
        self._encoder = Sam(spec, SAM, halves, self)
        self._out = self.make_dense("multi_modal_projector", hidden_size, 2 * width)
        self._newline = self.tensor("image_newline", hidden_size)
        self._separator = self.tensor("view_separator", hidden_size)
        self.name_in_files(PARTS_IN_FILES)
        others = self.named_weights, self.module_weights
        self.named_weights = {}
        self._reader = _Clip(spec.clip, _CLIP, self)
        self.name_in_files(_OF_CLIP)
        self.name_joined(_OF_CLIP, "qkv_proj")
        self.named_weights |= others[0]
        self.module_weights |= others[1]

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        tiles, rows, columns = grid
        is_whole = (rows, columns) == (0, 0)
        side = self._spec.WHOLE_SIDE if is_whole else self._spec.TILE_SIDE
        if not is_whole and tiles != rows * columns:
            raise ValueError(f"a grid of {rows} rows and {columns} columns has {tiles} tiles")
        embedded = torch.stack([self._embed(tile, side) for tile in tiles_of(pixels, grid)])
        found = picture_of(embedded, max(rows, 1), max(columns, 1), self._newline)
        return torch.cat([found, self._separator[None]]) if is_whole else found

    def _embed(self, tile: Tensor, side: int) -> Tensor:
        x = self._encoder(tile, side)
        return self._out(torch.cat([self._reader(x), x], -1))


class _Clip:
    """CLIP's encoder (Radford et al., 2021) of squares of any size, without its patches and its
    last norm. The table of positions is resized."""

    def __init__(self, spec: EncoderSpec, prefix: str, tower: Tower) -> None:
        width, self._side = spec.hidden_size, spec.side
        self._class = tower.tensor(f"{prefix}embeddings.class_embedding", width)
        self._positions = tower.tensor(
            f"{prefix}embeddings.position_embedding.weight", spec.side**2 + 1, width
        )
        self._norm = tower.make_layer_norm(f"{prefix}pre_layrnorm", width, spec.eps)
        self._layers = [
            EncoderLayer(spec, f"{prefix}encoder.layers.{layer}", tower, is_joined=True)
            for layer in range(spec.num_layers)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Reads a square, row by row: [places, width] -> [places, width]."""
        table = self._positions[1:].view(1, self._side, self._side, -1)
        places = resized(table, isqrt(len(x))).flatten(0, 2)
        x = torch.cat([self._class[None], x]) + torch.cat([self._positions[:1], places])
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x)
        return x[1:]
