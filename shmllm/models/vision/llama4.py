"""The tower of Llama 4: an encoder that rotates by rows and columns, with a class token behind the
patches, and three projections of squares of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower, attend
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.projected_specs import Llama4Tower
from shmllm.models.vision.tiles import Pixels, patches_of_tile, tiles_of

_ENCODER, _ADAPTER = "vision_model.", "vision_model.vision_adapter.mlp."


class Llama4(Tower):
    """See `specs.Llama4Tower`."""

    def __init__(self, spec: Llama4Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        encoder, adapted = spec.encoder, spec.adapted
        width, eps = encoder.hidden_size, encoder.eps
        self._patches = self.make_dense(
            f"{_ENCODER}patch_embedding.linear", width, 3 * encoder.patch_size**2, bias=False
        )
        self._class = self.tensor(f"{_ENCODER}class_embedding", width)
        self._positions = self.tensor(
            f"{_ENCODER}positional_embedding_vlm", encoder.side**2 + 1, width
        )
        self._first_norm = self.make_layer_norm(f"{_ENCODER}layernorm_pre", width, eps)
        self._layers = [
            _Layer(spec, f"{_ENCODER}model.layers.{layer}", self)
            for layer in range(encoder.num_layers)
        ]
        self._final_norm = self.make_layer_norm(f"{_ENCODER}layernorm_post", width, eps)
        merged = width * spec.factor**2
        self._adapters = [
            self.make_dense(f"{_ADAPTER}fc1", adapted, merged, bias=False),
            self.make_dense(f"{_ADAPTER}fc2", adapted, adapted, bias=False),
        ]
        self._out = self.make_dense(
            "multi_modal_projector.linear_1", hidden_size, adapted, bias=False
        )

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        size, side = self._spec.encoder.image_size, self._spec.encoder.side
        patches = patches_of_tile(tile, size, self._spec.encoder.patch_size)
        x = torch.cat([self._patches(patches.to(self.dtype)), self._class[None]])
        x = self._first_norm(x + self._positions)
        rotation = _rotation(self._spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation)
        x, factor = self._final_norm(x)[:-1], self._spec.factor
        squares = x.view(side // factor, factor, side // factor, factor, -1).transpose(1, 2)
        merged = squares.reshape((side // factor) ** 2, -1)
        for adapter in self._adapters:
            merged = F.gelu(adapter(merged))
        return self._out(merged)


class _Layer:
    """One layer: attention and an MLP, each behind a norm."""

    def __init__(self, spec: Llama4Tower, prefix: str, tower: Tower) -> None:
        encoder = spec.encoder
        width = encoder.hidden_size
        self._heads = encoder.num_heads
        self._norms = [
            tower.make_layer_norm(f"{prefix}.{place}_layernorm", width, encoder.eps)
            for place in ("input", "post_attention")
        ]
        self._qkv = [
            tower.make_dense(f"{prefix}.self_attn.{name}_proj", width, width) for name in "qkv"
        ]
        self._out = tower.make_dense(f"{prefix}.self_attn.o_proj", width, width)
        self._up = tower.make_dense(f"{prefix}.mlp.fc1", encoder.inner, width)
        self._down = tower.make_dense(f"{prefix}.mlp.fc2", width, encoder.inner)

    def __call__(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Runs the layer: [patches and class, width] -> the same."""
        normed = self._norms[0](x)
        q, k, v = (dense(normed).unflatten(1, (self._heads, -1)) for dense in self._qkv)
        read = attend(_rotated(q, rotation)[None], _rotated(k, rotation)[None], v[None])
        x = x + self._out(read.reshape(x.shape))
        return x + self._down(F.gelu(self._up(self._norms[1](x))))


def _rotation(spec: Llama4Tower, device: torch.device) -> Tensor:
    """Returns the angles of the pairs of a head, [patches and class, 1, head_dim / 2] as complex
    numbers: the first half of the pairs turns by the column of a patch, counted from 1, the others
    by its row. The class token stays."""
    encoder = spec.encoder
    half = encoder.hidden_size // encoder.num_heads // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    frequencies = 1.0 / spec.theta**exponents
    places = torch.arange(1, encoder.side + 1, dtype=torch.float32, device=device)
    of_places = places[:, None] * frequencies
    columns = of_places[None].expand(encoder.side, -1, -1)
    angles = torch.cat([columns, columns.transpose(0, 1)], -1).flatten(0, 1)
    angles = torch.cat([angles, torch.zeros_like(angles[:1])])[:, None]
    return torch.polar(torch.ones_like(angles), angles)


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Returns ``x`` [patches, heads, head_dim] with neighbouring elements rotated together."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
