"""The towers of CLIP and SigLIP as models of images and texts: one vector of each image."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Dense, Tower, attend
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.encoder_spec import LayerSpec
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.pooled_specs import PooledTower
from shmllm.models.vision.tiles import Pixels, tiles_of

ENCODER = "vision_model."


class Pooled(Tower):
    """See `pooled_specs.PooledTower`."""

    def __init__(self, spec: PooledTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        encoder, width = spec.encoder, spec.encoder.hidden_size
        self._encoder = Encoder(encoder, ENCODER, self)
        self._probe: Probe | None = None
        self._projection: Dense | None = None
        if encoder.kind == "siglip":
            self._probe = Probe(encoder, f"{ENCODER}head.", self)
        else:
            self._projection = self.make_dense("visual_projection", spec.width, width, bias=False)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._pooled(tile) for tile in tiles_of(pixels, grid)])

    def _pooled(self, tile: Tensor) -> Tensor:
        x = self._encoder(tile)
        if self._probe is not None:
            return self._probe(x)
        assert self._projection is not None, "it has the one or the other"
        return self._projection(x[:1])


class Probe:
    """Attention of one learned query to the patches of an image, and an MLP behind a norm (Zhai et
    al., "Scaling Vision Transformers", 2022, section 3.3).

    Args:
        spec: the layers of the encoder, which the MLP and the heads are like.
        prefix: of its weights' names, with a dot.
        tower: owns the weights.
    """

    def __init__(self, spec: LayerSpec, prefix: str, tower: Tower) -> None:
        width, at = spec.hidden_size, f"{prefix}attention."
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._query = tower.tensor(f"{prefix}probe", 1, 1, width)
        weight = tower.tensor(f"{at}in_proj_weight", 3 * width, width)
        bias = tower.tensor(f"{at}in_proj_bias", 3 * width)
        self._q = Dense(weight[:width], bias[:width], tower.products)
        self._kv = Dense(weight[width:], bias[width:], tower.products)
        self._out = tower.make_dense(f"{at}out_proj", width, width)
        self._norm = tower.make_layer_norm(f"{prefix}layernorm", width, spec.eps)
        self._up = tower.make_dense(f"{prefix}mlp.fc1", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}mlp.fc2", width, spec.inner)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the vector, [1, width], of patches [patches, width]."""
        of_probe = self._q(self._query[0])
        parts = (of_probe, *self._kv(x).chunk(2, 1))
        q, k, v = (part.reshape(1, len(part), self._heads, -1) for part in parts)
        read = self._out(attend(q, k, v).reshape(1, -1))
        return read + self._down(self._activation(self._up(self._norm(read))))
