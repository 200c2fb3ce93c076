"""The tower of InternVL: an encoder whose layers scale what they add, a norm and two projections of
squares of patches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.specs import Grid, InternVLTower
from shmllm.models.vision.tiles import Pixels, patches_of, tiles_of

_ENCODER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_LAYERS = f"{_ENCODER}encoder.layer."
_QK_EPS, _PROJECTOR_EPS = 1e-6, 1e-5

Normalise = Callable[[Tensor], Tensor]


class InternVL(Tower):
    """See `specs.InternVLTower`."""

    def __init__(self, spec: InternVLTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        encoder = spec.encoder
        width, size, at = encoder.hidden_size, encoder.patch_size, f"{_ENCODER}embeddings."
        self._class = self.tensor(f"{at}cls_token", 1, 1, width)
        self._positions = self.tensor(f"{at}position_embeddings", 1, encoder.side**2 + 1, width)
        self._patches = self.make_dense(f"{at}patch_embeddings.projection", width, 3, size, size)
        self._layers = [
            _Layer(spec, f"{_LAYERS}{layer}.", self) for layer in range(encoder.num_layers)
        ]
        self._final_norm: Normalise | None = None
        if encoder.final_norm:
            self._final_norm = self.make_layer_norm(f"{_ENCODER}layernorm", width, encoder.eps)
        merged = width * spec.factor**2
        self._norm = self.make_layer_norm(f"{_PROJECTOR}layer_norm", merged, _PROJECTOR_EPS)
        self._up = self.make_dense(f"{_PROJECTOR}linear_1", hidden_size, merged)
        self._down = self.make_dense(f"{_PROJECTOR}linear_2", hidden_size, hidden_size)
        unneeded = range(encoder.num_layers, spec.num_stored)
        self.unused = (
            f"{at}mask_token",
            *(f"{_LAYERS}{layer}." for layer in unneeded),
            *(() if encoder.final_norm else (f"{_ENCODER}layernorm.",)),
        )

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        size, side = self._spec.encoder.image_size, self._spec.encoder.side
        if tile.shape != (3, size, size):
            raise ValueError(f"a tile must be [3, {size}, {size}], not {list(tile.shape)}")
        patches = patches_of(tile, self._spec.encoder.patch_size).flatten(2).flatten(0, 1)
        x = self._patches(patches.to(self.dtype))
        x = torch.cat([self._class[0], x]) + self._positions[0]
        for layer in self._layers:
            x = layer(x)
        x = (x if self._final_norm is None else self._final_norm(x))[1:]
        factor = self._spec.factor
        squares = x.view(side // factor, factor, side // factor, factor, -1).transpose(1, 2)
        merged = self._norm(squares.reshape((side // factor) ** 2, -1))
        return self._down(ACTIVATIONS[self._spec.activation](self._up(merged)))


class _Layer:
    """One layer: attention and an MLP, each behind a norm; what it adds has a factor for each
    element."""

    def __init__(self, spec: InternVLTower, prefix: str, tower: Tower) -> None:
        encoder = spec.encoder
        width, attention = encoder.hidden_size, f"{prefix}attention."
        self._heads, self._activation = encoder.num_heads, ACTIVATIONS[encoder.activation]
        make_norm = tower.make_rms_norm if spec.rms_norms else tower.make_layer_norm
        self._norms: list[Normalise] = [
            make_norm(f"{prefix}layernorm_{place}", width, encoder.eps)
            for place in ("before", "after")
        ]
        self._qkv = [
            tower.make_dense(f"{attention}{name}_proj", width, width, bias=spec.attention_bias)
            for name in "qkv"
        ]
        self._qk_norms = [
            tower.make_rms_norm(f"{attention}{name}_norm", width, _QK_EPS)
            for name in ("qk" if spec.qk_norm else "")
        ]
        self._out = tower.make_dense(f"{attention}projection_layer", width, width)
        self._up = tower.make_dense(f"{prefix}mlp.fc1", encoder.inner, width)
        self._down = tower.make_dense(f"{prefix}mlp.fc2", width, encoder.inner)
        self._scales = [tower.tensor(f"{prefix}lambda_{number}", width) for number in (1, 2)]

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        normed = self._norms[0](x)
        qkv = [dense(normed) for dense in self._qkv]
        for index, norm in enumerate(self._qk_norms):
            qkv[index] = norm(qkv[index])
        q, k, v = (each.view(1, len(x), self._heads, -1) for each in qkv)
        x = x + self._scales[0] * self._out(attend(q, k, v).reshape(x.shape))
        inner = self._activation(self._up(self._norms[1](x)))
        return x + self._scales[1] * self._down(inner)
