"""The tower of GLM-4.1V: an encoder for images of any size, whose table of positions is
interpolated bicubically, and a projection of squares of patches behind it."""

from __future__ import annotations

from math import isqrt

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import Rotation, attend_within, embed_patches, interpolated
from shmllm.models.vision.squares_specs import (
    Glm4vTower,
    GlmOcrTower,
)

_MERGER_EPS = 1e-5


class Glm4v(Tower):
    """See `specs.Glm4vTower`."""

    def __init__(self, spec: Glm4vTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size = spec.hidden_size, spec.patch_size
        self._patches = self.make_dense(
            "visual.patch_embed.proj", width, 3, spec.num_frames, size, size
        )
        self._first_norm = self.make_rms_norm("visual.post_conv_layernorm", width, spec.eps)
        self._positions = self.tensor(
            "visual.embeddings.position_embedding.weight", spec.num_positions, width
        )
        self._layers = [
            _Layer(spec, f"visual.blocks.{layer}", self) for layer in range(spec.num_layers)
        ]
        self._merger = Merger(spec, hidden_size, self)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        x = self._first_norm(embed_patches(pixels, grid, spec, self._patches))
        side = isqrt(spec.num_positions)
        x = x + interpolated(self._positions.view(side, side, -1), grid, spec.merge_size)
        rotation = Rotation(grid, spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation)
        return self._merger(x)


class _Layer:
    """One layer: attention to the whole image and an MLP, each behind a norm."""

    def __init__(self, spec: Glm4vTower, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_rms_norm(f"{prefix}.norm{number}", width, spec.eps) for number in (1, 2)
        ]
        self._qkv = tower.make_dense(
            f"{prefix}.attn.qkv", 3 * width, width, bias=spec.attention_bias
        )
        self._out = tower.make_dense(f"{prefix}.attn.proj", width, width, bias=False)
        self._gate, self._up = (
            tower.make_dense(f"{prefix}.mlp.{name}_proj", spec.inner, width, bias=False)
            for name in ("gate", "up")
        )
        self._down = tower.make_dense(f"{prefix}.mlp.down_proj", width, spec.inner, bias=False)

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        qkv = self._qkv(self._norms[0](x))
        x = x + self._out(attend_within(qkv, self._heads, rotation, []))
        normed = self._norms[1](x)
        return x + self._down(self._activation(self._gate(normed)) * self._up(normed))


class Merger:
    """A norm of patches, a projection of squares of them, another one, a norm, an activation and an
    MLP.

    Args:
        spec: what the tower computes.
        hidden_size: the width of embeddings.
        tower: owns the weights.
    """

    def __init__(self, spec: Glm4vTower | GlmOcrTower, hidden_size: int, tower: Tower) -> None:
        width, square, at = spec.hidden_size, spec.merge_size, "visual.merger."
        self._activation, self._size = ACTIVATIONS[spec.activation], square
        self._first_norm = tower.make_rms_norm("visual.post_layernorm", width, spec.eps)
        self._squares = tower.make_dense("visual.downsample", hidden_size, width, square, square)
        self._first = tower.make_dense(f"{at}proj", hidden_size, hidden_size, bias=False)
        self._norm = tower.make_layer_norm(f"{at}post_projection_norm", hidden_size, _MERGER_EPS)
        self._gate, self._up = (
            tower.make_dense(f"{at}{name}_proj", spec.merger_inner, hidden_size, bias=False)
            for name in ("gate", "up")
        )
        self._down = tower.make_dense(f"{at}down_proj", hidden_size, spec.merger_inner, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes [embeddings, hidden] of patches [patches, width], square by square."""
        squares = self._first_norm(x).unflatten(0, (-1, self._size**2))
        x = self._squares(squares.transpose(1, 2).flatten(1))
        x = F.gelu(self._norm(self._first(x)))
        return self._down(self._activation(self._gate(x)) * self._up(x))
