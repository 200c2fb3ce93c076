"""The towers of Janus and DeepSeek-VL: SigLIP, and projections of its results with activations
between them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.projected_specs import JanusTower
from shmllm.models.vision.tiles import Pixels, tiles_of
from shmllm.models.weight_names import renamed


class Janus(Tower):
    """See `specs.JanusTower`.

    Attributes:
        names: what checkpoints have in place of parts of names.
    """

    names: ClassVar[Mapping[str, str]] = MappingProxyType({".out_proj.": ".projection_layer."})

    def __init__(self, spec: JanusTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._encoder = Encoder(spec.encoder, "vision_model.", self)
        self._activation = ACTIVATIONS[spec.activation]
        self._first = self.make_dense("aligner.fc1", hidden_size, spec.encoder.hidden_size)
        self._others = [
            self.make_dense(f"aligner.hidden_layers.{index}", hidden_size, hidden_size)
            for index in range(spec.depth - 1)
        ]
        self.named_weights = {
            renamed(name, self.names): views for name, views in self.named_weights.items()
        }

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        x = self._first(self._encoder(tile))
        for dense in self._others:
            x = dense(self._activation(x))
        return x


class DeepseekVL(Janus):
    """See `specs.DeepseekVLTower`."""

    unused = ("vision_model.head.",)
    names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {".fc1.": ".linear1.", ".hidden_layers.0.": ".linear2.", ".mlp.linear1.": ".mlp.fc1."}
    )
    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {f"{outer}vision_model.vision_model.": "vision_model." for outer in ("model.", "")}
    )
