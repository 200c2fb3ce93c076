"""The tower of MiniCPM-V 4.6 and MiniCPM-OCR: SigLIP for images of any size. In the middle of it
squares of four patches attend within themselves and become one, unless that is left out, and
squares of four of those behind it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower, attend
from shmllm.models.vision.encoder import EncoderLayer
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import in_squares, patches_in_squares
from shmllm.models.vision.squares_specs import MiniCPMVTower

_ENCODER, _SIDE = "vision_tower.", 2
_MERGER, _MERGER_EPS = "merger.mlp.0.", 1e-6


class MiniCPMV(Tower):
    """See `squares_specs.MiniCPMVTower`."""

    def __init__(self, spec: MiniCPMVTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size, at = spec.hidden_size, spec.patch_size, f"{_ENCODER}embeddings."
        self._patches = self.make_dense(f"{at}patch_embedding", width, 3, size, size)
        self._positions = self.tensor(f"{at}position_embedding.weight", spec.table_side**2, width)
        self._layers = [
            EncoderLayer(spec, f"{_ENCODER}encoder.layers.{layer}", self)
            for layer in range(spec.num_layers)
        ]
        self._windows = None
        if spec.merged_behind is None:
            self.unused = (f"{_ENCODER}vit_merger.",)
        else:
            self._windows = _Windows(spec, self)
        self._norm = self.make_layer_norm(f"{_ENCODER}post_layernorm", width, spec.eps)
        merged = width * _SIDE**2
        self._merged_norm = self.make_layer_norm(f"{_MERGER}pre_norm", merged, _MERGER_EPS)
        self._up = self.make_dense(f"{_MERGER}linear_1", merged, merged)
        self._down = self.make_dense(f"{_MERGER}linear_2", hidden_size, merged)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        patches = _nested(patches_in_squares(pixels, grid, self._spec), self._spec.merge_size)
        x = self._patches(patches.flatten(1).to(self.dtype)) + self._rows_of_positions(grid)
        for index, layer in enumerate(self._layers):
            x = layer(x)
            if self._windows is not None and index == self._spec.merged_behind:
                x = self._windows(x)
        merged = self._merged_norm(self._norm(x).view(-1, self._up.weight.shape[1]))
        return self._down(F.gelu(self._up(merged)))

    def _rows_of_positions(self, grid: Grid) -> Tensor:
        """Returns the position embeddings [patches, width] of an image, square by square: the
        position of a patch is its row's and its column's fraction of the image, rounded down."""
        side, device = self._spec.table_side, self._positions.device
        ends = torch.arange(1 / side, 1.0, 1 / side, device=device)
        rows, columns = (
            torch.bucketize(torch.arange(count, device=device) / count, ends, right=True)
            for count in grid[1:]
        )
        places = in_squares(rows[:, None] * side + columns, self._spec.merge_size)
        return self._positions[_nested(places, self._spec.merge_size)]


class _Windows:
    """Attention within squares of four patches, each of which becomes one."""

    def __init__(self, spec: MiniCPMVTower, tower: Tower) -> None:
        at, width = f"{_ENCODER}vit_merger.", spec.hidden_size
        self._heads = spec.num_heads
        self._norm = tower.make_layer_norm(f"{at}layer_norm1", width, spec.eps)
        self._qkv = [tower.make_dense(f"{at}self_attn.{name}_proj", width, width) for name in "qkv"]
        self._out = tower.make_dense(f"{at}self_attn.out_proj", width, width)
        count = _SIDE**2
        self._merged_norm = tower.make_layer_norm(f"{at}pre_norm", count * width, spec.eps)
        self._up = tower.make_dense(f"{at}linear_1", count * spec.inner, count * width)
        self._down = tower.make_dense(f"{at}linear_2", width, count * spec.inner)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes [windows, width] of [patches, width], which follow one another by window."""
        normed, count = self._norm(x), _SIDE**2
        q, k, v = (dense(normed).view(-1, count, self._heads, self._dim(x)) for dense in self._qkv)
        x = x + self._out(attend(q, k, v).reshape(x.shape))
        windows = x.view(-1, count, x.shape[1])
        inner = F.gelu(self._up(self._merged_norm(windows.flatten(1))), approximate="tanh")
        merged: Tensor = self._down(inner) + windows.mean(1)
        return merged

    def _dim(self, x: Tensor) -> int:
        return x.shape[1] // self._heads


def _nested(x: Tensor, side: int) -> Tensor:
    """Returns what patches have in the order of windows within each square, of what they have row
    by row within each.

    Args:
        x: [patches, ...], square by square.
        side: the side of a square, in patches.
    """
    half = side // _SIDE
    squares: Tensor = x.unflatten(0, (-1, half, _SIDE, half, _SIDE))
    return squares.transpose(2, 3).flatten(0, 4)
