"""The tower of DeepSeek-OCR 2: SAM's encoder for tiles and for the whole of an image, and a decoder
of Qwen 2 that reads what it makes, and queries behind that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.deepseek_ocr import PARTS_IN_FILES, SAM
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.sam import Sam
from shmllm.models.vision.sam_specs import DeepseekOcr2Tower, ReaderSpec
from shmllm.models.vision.tiles import Pixels, tiles_of

_READER = "vision_tower.vision_encoder."
_IN_FILES = PARTS_IN_FILES | {
    _READER: "qwen2_model.model.model.",
    "vision_tower.query_768_resolution.": "qwen2_model.query_768.",
    "vision_tower.query_1024_resolution.": "qwen2_model.query_1024.",
}


class DeepseekOcr2(Tower):
    """See `sam_specs.DeepseekOcr2Tower`."""

    def __init__(self, spec: DeepseekOcr2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width = spec.reader.hidden_size
        halves = [(f"{SAM}proj.conv1", spec.inner), (f"{SAM}proj.conv2", width)]
        self._encoder = Sam(spec, SAM, halves, self)
        self._queries = {
            side: self.tensor(
                f"vision_tower.query_{name}_resolution.weight", spec.num_rows(side) ** 2, width
            )
            for side, name in ((spec.TILE_SIDE, 768), (spec.WHOLE_SIDE, 1024))
        }
        self._layers = [
            _Layer(spec.reader, f"{_READER}layers.{layer}.", self)
            for layer in range(spec.reader.num_layers)
        ]
        self._norm = self.make_rms_norm(f"{_READER}norm", width, spec.reader.eps)
        self._out = self.make_dense("multi_modal_projector", hidden_size, width)
        self._separator = self.tensor("view_separator", hidden_size)
        self.name_in_files(_IN_FILES)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        is_whole = grid[1:] == (0, 0)
        side = self._spec.WHOLE_SIDE if is_whole else self._spec.TILE_SIDE
        parts = [self._embed(tile, side) for tile in tiles_of(pixels, grid)]
        return torch.cat([*parts, self._separator[None]] if is_whole else parts)

    def _embed(self, tile: Tensor, side: int) -> Tensor:
        x = torch.cat([self._encoder(tile, side), self._queries[side]])
        count = len(x) - len(self._queries[side])
        places = torch.arange(len(x), device=x.device)
        seen = (places[:, None] >= places) | (places < count)[:, None] & (places < count)
        dim = self._spec.reader.hidden_size // self._spec.reader.num_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim
        angles = places[:, None].float() * (1.0 / self._spec.reader.theta**exponents)
        waves = torch.stack([angles.cos(), angles.sin()]).to(x.dtype)
        for layer in self._layers:
            x = layer(x, waves, seen)
        return self._out(self._norm(x[count:]))


class _Layer:
    """One layer: attention and an MLP with a gate, each behind a norm."""

    def __init__(self, spec: ReaderSpec, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._heads = spec.num_heads
        self._norms = [
            tower.make_rms_norm(f"{prefix}{name}_layernorm", width, spec.eps)
            for name in ("input", "post_attention")
        ]
        of_keys = width // spec.num_heads * spec.num_kv_heads
        self._qkv = [
            tower.make_dense(f"{prefix}self_attn.{name}_proj", size, width)
            for name, size in (("q", width), ("k", of_keys), ("v", of_keys))
        ]
        self._out = tower.make_dense(f"{prefix}self_attn.o_proj", width, width, bias=False)
        self._gate, self._up = (
            tower.make_dense(f"{prefix}mlp.{name}_proj", spec.inner, width, bias=False)
            for name in ("gate", "up")
        )
        self._down = tower.make_dense(f"{prefix}mlp.down_proj", width, spec.inner, bias=False)

    def __call__(self, x: Tensor, waves: Tensor, seen: Tensor) -> Tensor:
        """Runs the layer: [places, width] -> [places, width].

        Args:
            x: the stream.
            waves: [2, places, head_dim / 2]: cosines and sines of angles.
            seen: [places, places]: whether the first one reads the second.
        """
        normed = self._norms[0](x)
        dim = x.shape[1] // self._heads
        q, k, v = (dense(normed).unflatten(1, (-1, dim)).transpose(0, 1) for dense in self._qkv)
        q, k = (_rotated(each, *waves) for each in (q, k))
        k, v = (each.repeat_interleave(self._heads // len(each), 0) for each in (k, v))
        read = F.scaled_dot_product_attention(q[None], k[None], v[None], seen)[0]
        x = x + self._out(read.transpose(0, 1).flatten(1))
        normed = self._norms[1](x)
        return x + self._down(F.silu(self._gate(normed)) * self._up(normed))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads, [heads, places, head_dim], whose halves are turned together (Su et al.,
    2021)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
