"""The tower of GLM-OCR: an encoder for images of any size, whose queries and keys have norms, and
GLM-4.1V's projection of squares of patches behind it."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.glm4v import Merger
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import Rotation, embed_patches
from shmllm.models.vision.squares_specs import (
    GlmOcrTower,
)


class GlmOcr(Tower):
    """See `specs.GlmOcrTower`."""

    def __init__(self, spec: GlmOcrTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size = spec.hidden_size, spec.patch_size
        self._patches = self.make_dense(
            "visual.patch_embed.proj", width, 3, spec.num_frames, size, size
        )
        self._layers = [
            _Layer(spec, f"visual.blocks.{layer}", self) for layer in range(spec.num_layers)
        ]
        self._merger = Merger(spec, hidden_size, self)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        x = embed_patches(pixels, grid, self._spec, self._patches)
        rotation = Rotation(grid, self._spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation)
        return self._merger(x)


class _Layer:
    """One layer: attention to the whole image and an MLP, each behind a norm."""

    def __init__(self, spec: GlmOcrTower, prefix: str, tower: Tower) -> None:
        width, inner, bias = spec.hidden_size, spec.inner, spec.bias
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_rms_norm(f"{prefix}.norm{number}", width, spec.eps) for number in (1, 2)
        ]
        self._qkv = tower.make_dense(f"{prefix}.attn.qkv", 3 * width, width, bias=bias)
        self._q_norm, self._k_norm = (
            tower.make_rms_norm(f"{prefix}.attn.{name}_norm", width // spec.num_heads, spec.eps)
            for name in "qk"
        )
        self._out = tower.make_dense(f"{prefix}.attn.proj", width, width, bias=bias)
        self._gate, self._up = (
            tower.make_dense(f"{prefix}.mlp.{name}_proj", inner, width, bias=bias)
            for name in ("gate", "up")
        )
        self._down = tower.make_dense(f"{prefix}.mlp.down_proj", width, inner, bias=bias)

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        x = x + self._out(self._read(self._norms[0](x), rotation))
        normed = self._norms[1](x)
        return x + self._down(self._activation(self._gate(normed)) * self._up(normed))

    def _read(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Computes what patches read from one another, [patches, width], of the same."""
        q, k, v = self._qkv(x).unflatten(1, (3, self._heads, -1)).unbind(1)
        q, k = rotation(self._q_norm(q)), rotation(self._k_norm(k))
        return attend(q[None], k[None], v[None])[0].flatten(1)
