"""The tower of Granite-Docling: SigLIP, projections of squares of patches, and levels of embeddings
of its inner layers (Meng et al., "DeepStack", 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.idefics3 import squares_of
from shmllm.models.vision.projected_specs import GraniteDoclingTower
from shmllm.models.vision.tiles import Pixels, tiles_of

_ENCODER, _CONNECTOR = "vision_model.", "vision_model.connector."
_EPS, _BASE = 1e-5, 10_000.0


class GraniteDocling(Tower):
    """See `specs.GraniteDoclingTower`."""

    unused = (f"{_CONNECTOR}fine.",)

    def __init__(self, spec: GraniteDoclingTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        self._encoder = Encoder(spec.encoder, _ENCODER, self)
        width, path = spec.encoder.hidden_size, f"{_CONNECTOR}coarse."
        merged = width * spec.factor**2
        self._norms = [
            self.make_layer_norm(f"{_CONNECTOR}ln_{name}", size, _EPS)
            for name, size in (("in", width), ("mid", hidden_size), ("out", hidden_size))
        ]
        self._up = self.make_dense(f"{path}projection", hidden_size, merged, bias=False)
        self._down = self.make_dense(f"{_CONNECTOR}mlp_fc2", hidden_size, hidden_size, bias=False)
        self._levels = [
            _Merger(merged, hidden_size, f"{path}deepstack_mergers.{level}", self)
            for level in range(len(spec.level_layers))
        ]

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        x, inner = self._encoder.with_inner(tile, self._spec.level_layers)
        first, middle, last = self._norms
        factor = self._spec.factor
        x = self._up(squares_of(first(x), factor))
        x = x + _positions(self._encoder.spec.side // factor, x)
        x = last(self._down(F.gelu(middle(x))))
        levels = zip(self._levels, inner, strict=True)
        return torch.cat([x, *(level(squares_of(each, factor)) for level, each in levels)], -1)


class _Merger:
    """Two projections of squares of patches, behind a norm of squares."""

    def __init__(self, merged: int, hidden_size: int, prefix: str, tower: Tower) -> None:
        self._norm = tower.make_layer_norm(f"{prefix}.layer_norm", merged, _EPS)
        self._up = tower.make_dense(f"{prefix}.linear_1", hidden_size, merged)
        self._down = tower.make_dense(f"{prefix}.linear_2", hidden_size, hidden_size)

    def __call__(self, squares: Tensor) -> Tensor:
        """Computes [embeddings, hidden] of [embeddings, merged]."""
        return self._down(F.gelu(self._up(self._norm(squares))))


def _positions(side: int, like: Tensor) -> Tensor:
    """Returns sines and cosines of the columns of places, and of their rows (Vaswani et al., 2017,
    section 3.5, for each axis), computed in float64.

    Args:
        side: the number of places in a row and in a column.
        like: [places, width], whose width, dtype and device are those of the result.
    """
    quarter = like.shape[1] // 4
    powers = torch.arange(quarter, dtype=torch.float64, device=like.device) / quarter
    places = torch.arange(side, dtype=torch.float64, device=like.device)
    angles = places[:, None] / _BASE**powers
    waves = torch.cat([angles.sin(), angles.cos()], -1)
    of_columns, of_rows = waves.expand(side, side, -1), waves[:, None].expand(side, side, -1)
    return torch.cat([of_columns, of_rows], -1).flatten(0, 1).float().to(like.dtype)
