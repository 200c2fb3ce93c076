"""SAM's encoder (Kirillov et al., 2023) for square tiles, and the convolutions behind it.

Scores of attention have a term for the distance of a key's row from the query's, and one for the
distance of columns (Li et al., "MViTv2", 2022). Tables of positions and of distances are those of
the largest tiles, and are resized for smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import KERNEL, convolve_plane
from shmllm.models.tower import ACTIVATIONS, Dense, Tower
from shmllm.models.vision.sam_specs import SamTower
from shmllm.models.vision.tiles import patches_of_tile

_NECK_EPS = 1e-6


class Sam:
    """The encoder, what narrows its stream, and convolutions that halve rows and columns twice.

    Args:
        spec: what it computes.
        prefix: of the weights of the encoder, such as "vision_tower.".
        halves: the names of the convolutions, and the widths of their results.
        tower: owns the weights.
    """

    def __init__(
        self, spec: SamTower, prefix: str, halves: Sequence[tuple[str, int]], tower: Tower
    ) -> None:
        self._spec = spec
        encoder, neck, at = spec.encoder, spec.neck, f"{prefix}neck."
        width, size, side = encoder.hidden_size, encoder.patch_size, encoder.side
        self._patches = tower.make_dense(f"{prefix}patch_embed.projection", width, 3, size, size)
        self._positions = None
        if spec.has_positions:
            self._positions = tower.tensor(f"{prefix}pos_embed", 1, side, side, width)
        self._layers = [_Layer(spec, layer, prefix, tower) for layer in range(encoder.num_layers)]
        self._reduce = tower.make_dense(f"{at}conv1", neck, width, 1, 1, bias=False)
        self._blend = _convolution(f"{at}conv2", neck, neck, tower)
        self._norms = [
            tower.make_layer_norm(f"{at}layer_norm{number}", neck, _NECK_EPS) for number in (1, 2)
        ]
        widths = [neck, *(width for _, width in halves)]
        self._halve = [
            _convolution(name, outputs, inputs, tower)
            for (name, outputs), inputs in zip(halves, widths, strict=False)
        ]

    def __call__(self, tile: Tensor, side: int) -> Tensor:
        """Computes what becomes of a tile.

        Args:
            tile: [3, size, size].
            side: the number of its patches in a row.

        Returns:
            [places, width], row by row.

        Raises:
            ValueError: the tile has another size.
        """
        size = self._spec.encoder.patch_size
        whole = self._spec.encoder.image_size if side == self._spec.encoder.side else side * size
        patches = patches_of_tile(tile, whole, size)
        x = self._patches(patches.to(self._patches.weight.dtype)).view(side, side, -1)
        if self._positions is not None:
            x = x + resized(self._positions, side)[0]
        for layer in self._layers:
            x = layer(x)
        x = self._norms[0](self._reduce(x.flatten(0, 1))).view(1, side, side, -1)
        x = self._norms[1](convolve_plane(self._blend, x.permute(0, 3, 1, 2), stride=1))
        for halve in self._halve:
            x = convolve_plane(halve, x.permute(0, 3, 1, 2))
        return x.flatten(0, 2)


def _convolution(name: str, outputs: int, inputs: int, tower: Tower) -> Dense:
    return tower.make_dense(name, outputs, inputs, KERNEL, KERNEL, bias=False)


def resized(positions: Tensor, side: int) -> Tensor:
    """Returns a table of positions, [1, rows, columns, width], with so many rows and columns: a
    bicubic interpolation with antialiasing, in float32."""
    if positions.shape[1] == side:
        return positions
    planes = positions.permute(0, 3, 1, 2).float()
    found = F.interpolate(planes, (side, side), mode="bicubic", antialias=True)
    return found.permute(0, 2, 3, 1).to(positions.dtype)


class _Layer:
    """One layer: attention to a window or to the whole tile, and an MLP, each behind a norm."""

    def __init__(self, spec: SamTower, layer: int, encoder_prefix: str, tower: Tower) -> None:
        encoder, prefix = spec.encoder, f"{encoder_prefix}layers.{layer}."
        width, attention = encoder.hidden_size, f"{prefix}attn."
        self._heads, self._activation = encoder.num_heads, ACTIVATIONS[encoder.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}layer_norm{number}", width, encoder.eps)
            for number in (1, 2)
        ]
        self._qkv = tower.make_dense(f"{attention}qkv", 3 * width, width, bias=spec.qkv_bias)
        self._out = tower.make_dense(f"{attention}proj", width, width)
        self._window = 0 if layer in spec.full_layers else spec.window
        longest = 2 * (self._window or encoder.side) - 1
        self._distances = [
            tower.tensor(f"{attention}rel_pos_{axis}", longest, width // encoder.num_heads)
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
        size = self._window or rows
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
        size = isqrt(q.shape[1])
        places = torch.arange(size, device=q.device)
        distances = places[:, None] - places + (size - 1)
        of_rows, of_columns = (
            _stretched(table, 2 * size - 1)[distances] for table in self._distances
        )
        queries = q.unflatten(1, (size, size))
        rows = torch.einsum("nhwc,hkc->nhwk", queries, of_rows)
        columns = torch.einsum("nhwc,wkc->nhwk", queries, of_columns)
        terms = rows[..., :, None] + columns[..., None, :]
        return terms.flatten(3, 4).flatten(1, 2)[:, None]


def _stretched(table: Tensor, length: int) -> Tensor:
    """Returns a table of distances, [distances, width], with another number of them, interpolated
    linearly; its ends stay those of the first and the last."""
    if len(table) == length:
        return table
    places = torch.arange(length, dtype=torch.float32, device=table.device) + 0.5
    places = (places * (len(table) / length) - 0.5).clamp(min=0)
    before = places.floor().long()
    behind = (before + 1).clamp(max=len(table) - 1)
    weights = (places - before)[:, None].to(table.dtype)
    return table[before] * (1 - weights) + table[behind] * weights
