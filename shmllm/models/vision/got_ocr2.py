"""The tower of GOT-OCR 2: SAM's encoder (Kirillov et al., 2023) for tiles of one size, convolutions
and a projection behind it.

Scores of attention have a term for the distance of a key's row from the query's, and one for the
distance of columns (Li et al., "MViTv2", 2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import KERNEL, convolve_plane
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Dense, Tower
from shmllm.models.vision.specs import GotOcr2Tower, Grid
from shmllm.models.vision.tiles import Pixels, patches_of_tile, tiles_of

_NECK_EPS = 1e-6
_ENCODER, _NECK, _PROJECTOR = "vision_tower.", "vision_tower.neck.", "multi_modal_projector."


class GotOcr2(Tower):
    """See `specs.GotOcr2Tower`."""

    def __init__(self, spec: GotOcr2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        encoder, neck = spec.encoder, spec.neck
        width, size, side = encoder.hidden_size, encoder.patch_size, encoder.side
        self._patches = self.make_dense(f"{_ENCODER}patch_embed.projection", width, 3, size, size)
        self._positions = None
        if spec.has_positions:
            self._positions = self.tensor(f"{_ENCODER}pos_embed", 1, side, side, width)
        self._layers = [_Layer(spec, layer, self) for layer in range(encoder.num_layers)]
        self._reduce = self.make_dense(f"{_NECK}conv1", neck, width, 1, 1, bias=False)
        self._blend = self._convolution(f"{_NECK}conv2", neck, neck)
        self._norms = [
            self.make_layer_norm(f"{_NECK}layer_norm{number}", neck, _NECK_EPS) for number in (1, 2)
        ]
        self._halve = [
            self._convolution(f"{_PROJECTOR}conv_upsampler1", 2 * neck, neck),
            self._convolution(f"{_PROJECTOR}conv_upsampler2", hidden_size, 2 * neck),
        ]
        self._out = self.make_dense(f"{_PROJECTOR}multimodal_projector", hidden_size, hidden_size)

    def _convolution(self, name: str, outputs: int, inputs: int) -> Dense:
        return self.make_dense(name, outputs, inputs, KERNEL, KERNEL, bias=False)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        size, side = self._spec.encoder.image_size, self._spec.encoder.side
        patches = patches_of_tile(tile, size, self._spec.encoder.patch_size)
        x = self._patches(patches.to(self.dtype)).view(side, side, -1)
        if self._positions is not None:
            x = x + self._positions[0]
        for layer in self._layers:
            x = layer(x)
        x = self._norms[0](self._reduce(x.flatten(0, 1))).view(1, side, side, -1)
        x = self._norms[1](convolve_plane(self._blend, x.permute(0, 3, 1, 2), stride=1))
        for halve in self._halve:
            x = convolve_plane(halve, x.permute(0, 3, 1, 2))
        return self._out(x.flatten(0, 2))


class _Layer:
    """One layer: attention to a window or to the whole tile, and an MLP, each behind a norm."""

    def __init__(self, spec: GotOcr2Tower, layer: int, tower: Tower) -> None:
        encoder, prefix = spec.encoder, f"{_ENCODER}layers.{layer}."
        width, attention = encoder.hidden_size, f"{prefix}attn."
        self._heads, self._activation = encoder.num_heads, ACTIVATIONS[encoder.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}layer_norm{number}", width, encoder.eps)
            for number in (1, 2)
        ]
        self._qkv = tower.make_dense(f"{attention}qkv", 3 * width, width, bias=spec.qkv_bias)
        self._out = tower.make_dense(f"{attention}proj", width, width)
        self._window = encoder.side if layer in spec.full_layers else spec.window
        self._distances = [
            tower.tensor(
                f"{attention}rel_pos_{axis}", 2 * self._window - 1, width // encoder.num_heads
            )
            for axis in ("hw" if spec.has_distances else "")
        ]
        self._up = tower.make_dense(f"{prefix}mlp.lin1", encoder.inner, width)
        self._down = tower.make_dense(f"{prefix}mlp.lin2", width, encoder.inner)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: [rows, columns, width] -> [rows, columns, width]."""
        x = x + self._read(self._norms[0](x))
        inner = self._activation(self._up(self._norms[1](x).flatten(0, 1)))
        return x + self._down(inner).view_as(x)

    def _read(self, x: Tensor) -> Tensor:
        """Computes what patches read from those of their window, [rows, columns, width], of the
        same. Windows reach beyond the right and the bottom, where patches are zero."""
        rows, columns, _ = x.shape
        size = self._window
        x = F.pad(x, (0, 0, 0, -columns % size, 0, -rows % size))
        windows = x.unflatten(1, (-1, size)).unflatten(0, (-1, size)).transpose(1, 2)
        read = self._attend(windows.flatten(0, 1).flatten(1, 2))
        read = read.view(*windows.shape).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return read[:rows, :columns]

    def _attend(self, x: Tensor) -> Tensor:
        """Computes [windows, patches, width] of the same, a head at a time: all scores of all
        heads would be hundreds of megabytes."""
        qkv = self._qkv(x.flatten(0, 1)).view(*x.shape[:2], 3, self._heads, -1)
        read = torch.empty_like(qkv[:, :, 0])
        for head in range(self._heads):
            q, k, v = qkv[:, :, :, head].unbind(2)
            read[:, :, head] = F.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], self._terms(q)
            )[:, 0]
        return self._out(read.flatten(2).flatten(0, 1)).view_as(x)

    def _terms(self, q: Tensor) -> Tensor | None:
        """Returns what is added to the scores of queries [windows, patches, head_dim], [windows, 1,
        patches, patches]; None: nothing."""
        if not self._distances:
            return None
        size = self._window
        places = torch.arange(size, device=q.device)
        distances = places[:, None] - places + (size - 1)
        of_rows, of_columns = (table[distances] for table in self._distances)
        queries = q.unflatten(1, (size, size))
        rows = torch.einsum("nhwc,hkc->nhwk", queries, of_rows)
        columns = torch.einsum("nhwc,wkc->nhwk", queries, of_columns)
        terms = rows[..., :, None] + columns[..., None, :]
        return terms.flatten(3, 4).flatten(1, 2)[:, None]
