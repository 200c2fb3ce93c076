"""The tower of Ovis 2: AIMv2's encoder (Fini et al., 2024), and a table of the embeddings of visual
words (Lu et al., "Ovis", 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.idefics3 import squares_of
from shmllm.models.vision.ovis2_specs import Ovis2Tower
from shmllm.models.vision.tiles import Pixels, patches_of_tile, tiles_of

_ENCODER = "vision_tower.transformer."
_HEAD_EPS = 1e-5
MARKS = 5
"""The words behind the others: of the begin of an image, the end of the whole, the end of a column,
of a row, and of the image."""


class Ovis2(Tower):
    """See `specs.Ovis2Tower`."""

    def __init__(self, spec: Ovis2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        encoder, at = spec.encoder, f"{_ENCODER}embeddings."
        width, size, words = encoder.hidden_size, encoder.patch_size, encoder.num_words
        self._encoder = encoder
        self._patches = self.make_dense(f"{at}patch_embedding", width, 3, size, size)
        self._positions = self.tensor(f"{at}position_embedding.weight", encoder.side**2, width)
        self._first_norm = self.make_rms_norm(f"{at}rms_norm", width, encoder.eps)
        self._layers = [
            _Layer(spec, f"{_ENCODER}encoder.layers.{layer}.", self)
            for layer in range(encoder.num_layers)
        ]
        self._last_norm = self.make_rms_norm(f"{_ENCODER}rms_norm", width, encoder.eps)
        merged = width * encoder.factor**2
        self._head = self.make_dense("vision_tower.head_linear", words, merged, bias=False)
        self._head_norm = self.make_layer_norm("vision_tower.head_norm", words, _HEAD_EPS)
        self._table = self.tensor("visual_embeddings_table.weight", words + MARKS, hidden_size)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        whole, *tiles = (self._embed(tile) for tile in tiles_of(pixels, grid))
        begin, behind_whole, behind_column, behind_row, end = self._table[-MARKS:].split(1)
        parts, columns = [begin, whole, behind_whole], grid[2]
        for number, tile in enumerate(tiles, 1):
            behind = behind_column if number % columns else behind_row
            parts += [tile, behind if number < len(tiles) else end]
        return torch.cat(parts if tiles else [*parts, end])

    def _embed(self, tile: Tensor) -> Tensor:
        encoder = self._encoder
        patches = patches_of_tile(tile, encoder.image_size, encoder.patch_size)
        x = self._first_norm(self._patches(patches.to(self.dtype))) + self._positions
        for layer in self._layers:
            x = layer(x)
        squares = squares_of(self._last_norm(x), encoder.factor)
        logits = self._head_norm(self._head(squares))
        words = self._table[: encoder.num_words]
        return self.products.multiply(logits.softmax(-1), words.t(), None)


class _Layer:
    """One layer: attention and an MLP with a gate, each behind a norm."""

    def __init__(self, spec: Ovis2Tower, prefix: str, tower: Tower) -> None:
        encoder = spec.encoder
        width, inner = encoder.hidden_size, encoder.inner
        self._heads, self._activation = encoder.num_heads, ACTIVATIONS[encoder.activation]
        self._norms = [
            tower.make_rms_norm(f"{prefix}rms_norm{number}", width, encoder.eps)
            for number in (1, 2)
        ]
        self._qkv = [
            tower.make_dense(f"{prefix}attention.{name}_proj", width, width, bias=spec.qkv_bias)
            for name in "qkv"
        ]
        out = f"{prefix}attention.out_proj"
        self._out = tower.make_dense(out, width, width, bias=spec.qkv_bias)
        self._gate, self._up, self._down = (
            tower.make_dense(f"{prefix}ffn.{name}_proj", outputs, inputs, bias=spec.mlp_bias)
            for name, outputs, inputs in (
                *(("gate", inner, width), ("up", inner, width)),
                ("down", width, inner),
            )
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        normed = self._norms[0](x)
        q, k, v = (dense(normed).view(1, len(x), self._heads, -1) for dense in self._qkv)
        x = x + self._out(attend(q, k, v).reshape(x.shape))
        normed = self._norms[1](x)
        return x + self._down(self._activation(self._gate(normed)) * self._up(normed))
