"""The tower of Qwen 3 VL: inner layers give levels of embeddings, too (Meng et al., "DeepStack",
2024)."""

from __future__ import annotations

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.qwen_layers import EPS, PlainLayer
from shmllm.models.vision.squares import Rotation, embed_patches, in_squares
from shmllm.models.vision.squares_specs import (
    Qwen3Tower,
)


class Qwen3(Tower):
    """See `specs.Qwen3Tower`."""

    def __init__(self, spec: Qwen3Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size = spec.hidden_size, spec.patch_size
        self._patches = self.make_dense(
            "visual.patch_embed.proj", width, 3, spec.num_frames, size, size
        )
        self._positions = self.tensor("visual.pos_embed.weight", spec.num_positions, width)
        self._layers = [
            PlainLayer(spec, f"visual.blocks.{layer}", ("linear_fc1", "linear_fc2"), self)
            for layer in range(spec.num_layers)
        ]
        self._merger = _Merger(spec, hidden_size, "visual.merger", self, norms_squares=False)
        mergers = "visual.merger_list" if spec.is_omni else "visual.deepstack_merger_list"
        self._levels = {
            layer: _Merger(spec, hidden_size, f"{mergers}.{level}", self, norms_squares=True)
            for level, layer in enumerate(spec.level_layers)
        }

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        x = embed_patches(pixels, grid, self._spec, self._patches)
        x = x + self._interpolated(grid).to(x.dtype)
        rotation = Rotation(grid, self._spec, x.device)
        levels = []
        for index, layer in enumerate(self._layers):
            x = layer(x, rotation)
            if index in self._levels:
                levels.append(self._levels[index](x))
        return torch.cat([self._merger(x), *levels], -1)

    def _interpolated(self, grid: Grid) -> Tensor:
        """Returns the position embeddings [patches, width] of an image, square by square: those of
        a square table, whose corners are those of the image, interpolated bilinearly."""
        side, device = isqrt(self._spec.num_positions), self._positions.device
        (above, below), of_rows = _neighbours(grid[1], side, device)
        (left, right), of_columns = _neighbours(grid[2], side, device)
        places = torch.stack([a[:, None] * side + b for a in (above, below) for b in (left, right)])
        weights = torch.stack([a[:, None] * b for a in of_rows for b in of_columns])
        places, weights = (
            in_squares(each.permute(1, 2, 0), self._spec.merge_size) for each in (places, weights)
        )
        return (self._positions[places] * weights[..., None]).sum(1)


def _neighbours(
    count: int, side: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the rows of a table before and behind each of `count` places that divide it evenly,
    and their weights, each [count]."""
    at = torch.arange(count, dtype=torch.float32, device=device) * (side - 1) / max(count - 1, 1)
    before = at.floor()
    behind = at - before
    first = before.long()
    return (first, (first + 1).clamp(max=side - 1)), (1 - behind, behind)


class _Merger:
    """Two projections of squares of patches, behind a norm of patches, or of squares."""

    def __init__(
        self, spec: Qwen3Tower, hidden_size: int, prefix: str, tower: Tower, norms_squares: bool
    ) -> None:
        self._width = spec.hidden_size * spec.merge_size**2
        normed = self._width if norms_squares else spec.hidden_size
        names = ("ln_q", "mlp.0", "mlp.2") if spec.is_omni else ("norm", "linear_fc1", "linear_fc2")
        norm, up, down = (f"{prefix}.{name}" for name in names)
        self._norm = tower.make_layer_norm(norm, normed, EPS)
        self._up = tower.make_dense(up, self._width, self._width)
        self._down = tower.make_dense(down, hidden_size, self._width)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes [embeddings, hidden] of [patches, width]."""
        squares = self._norm(x.view(-1, *self._norm.weight.shape)).view(-1, self._width)
        return self._down(F.gelu(self._up(squares)))
