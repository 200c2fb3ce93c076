"""The tower of Mistral 3, LightOnOCR and Pixtral: Pixtral's encoder, a projection of squares of
patches, which Pixtral itself lacks, and two more."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import Rotation, embed_patches
from shmllm.models.vision.squares_specs import (
    PixtralTower,
)

_EPS = 1e-5
_ENCODER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_LAYERS = f"{_ENCODER}transformer.layers."


class Pixtral(Tower):
    """See `specs.PixtralTower`."""

    def __init__(self, spec: PixtralTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size, bias = spec.hidden_size, spec.patch_size, spec.bias
        self._patches = self.make_dense(f"{_ENCODER}patch_conv", width, 3, size, size, bias=False)
        self._first_norm = self.make_rms_norm(f"{_ENCODER}ln_pre", width, _EPS)
        self._layers = [_Layer(spec, f"{_LAYERS}{layer}", self) for layer in range(spec.num_layers)]
        self._merger = _Merger(spec, self) if spec.merges else None
        self._up = self.make_dense(f"{_PROJECTOR}linear_1", hidden_size, width, bias=bias)
        self._down = self.make_dense(f"{_PROJECTOR}linear_2", hidden_size, hidden_size, bias=bias)
        self.unused = tuple(
            f"{_LAYERS}{layer}." for layer in range(spec.num_layers, spec.num_stored)
        )

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        x = self._first_norm(embed_patches(pixels, grid, spec, self._patches))
        rotation = Rotation(grid, spec, x.device, alternating=True)
        for layer in self._layers:
            x = layer(x, rotation)
        if self._merger is not None:
            x = self._merger(x[: spec.num_squares(*grid[1:]) * spec.merge_size**2])
        return self._down(ACTIVATIONS[spec.projector_activation](self._up(x)))


class _Merger:
    """A norm of patches, and a projection of squares of them."""

    def __init__(self, spec: PixtralTower, tower: Tower) -> None:
        width, self._count = spec.hidden_size, spec.merge_size**2
        self._norm = tower.make_rms_norm(f"{_PROJECTOR}norm", width, spec.eps)
        self._dense = tower.make_dense(
            f"{_PROJECTOR}patch_merger.merging_layer", width, width * self._count, bias=False
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Runs them: [patches, width], square by square -> [squares, width]."""
        squares = self._norm(x).unflatten(0, (-1, self._count))
        return self._dense(squares.transpose(1, 2).flatten(1))


class _Layer:
    """One layer: attention and an MLP, each behind a norm."""

    def __init__(self, spec: PixtralTower, prefix: str, tower: Tower) -> None:
        width, inner = spec.hidden_size, spec.inner
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_rms_norm(f"{prefix}.{name}_norm", width, _EPS)
            for name in ("attention", "ffn")
        ]
        self._qkv = [
            tower.make_dense(f"{prefix}.attention.{name}_proj", width, width, bias=False)
            for name in "qkv"
        ]
        self._out = tower.make_dense(f"{prefix}.attention.o_proj", width, width, bias=False)
        self._gate, self._up = (
            tower.make_dense(f"{prefix}.feed_forward.{name}_proj", inner, width, bias=False)
            for name in ("gate", "up")
        )
        self._down = tower.make_dense(f"{prefix}.feed_forward.down_proj", width, inner, bias=False)

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        normed = self._norms[0](x)
        q, k, v = (dense(normed).unflatten(1, (self._heads, -1)) for dense in self._qkv)
        read = attend(rotation(q)[None], rotation(k)[None], v[None])
        x = x + self._out(read.reshape(x.shape))
        normed = self._norms[1](x)
        return x + self._down(self._activation(self._gate(normed)) * self._up(normed))
