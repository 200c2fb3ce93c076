"""The tower of LFM3-VL: gated convolutions of the grid of patches beside attention to the whole
image, and two projections of squares of patches behind a norm of patches."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import Rotation, embed_patches, in_squares
from shmllm.models.vision.squares_specs import Lfm3VlTower

_ENCODER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_PROJECTOR_EPS = 1e-6
_IN_FILES = {
    "patch_embed.": "patchifier.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
}


class Lfm3Vl(Tower):
    """See `squares_specs.Lfm3VlTower`."""

    def __init__(self, spec: Lfm3VlTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, inner, bias = spec.hidden_size, spec.projector_inner, spec.projector_bias
        of_patch = 3 * spec.num_frames * spec.patch_size**2
        self._patches = self.make_dense(f"{_ENCODER}patch_embed", width, of_patch, bias=False)
        self._first_norm = self.make_rms_norm(f"{_ENCODER}embedding_norm", width, spec.eps)
        self._layers = [
            _Layer(spec, layer, f"{_ENCODER}layers.{layer}", self)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{_PROJECTOR}layer_norm", width, _PROJECTOR_EPS)
        merged = width * spec.merge_size**2
        self._up = self.make_dense(f"{_PROJECTOR}linear_1", inner, merged, bias=bias)
        self._down = self.make_dense(f"{_PROJECTOR}linear_2", hidden_size, inner, bias=bias)
        self.name_in_files(_IN_FILES)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        x = self._first_norm(embed_patches(pixels, grid, self._spec, self._patches))
        rotation = Rotation(grid, self._spec, x.device)
        for layer in self._layers:
            x = layer(x, grid, rotation)
        squares = self._norm(x).view(-1, self._up.weight.shape[1])
        return self._down(ACTIVATIONS[self._spec.projector_activation](self._up(squares)))


class _Layer:
    """One layer: attention or a convolution, and an MLP, each behind a norm."""

    def __init__(self, spec: Lfm3VlTower, layer: int, prefix: str, tower: Tower) -> None:
        width, inner = spec.hidden_size, spec.inner
        kind = _Attention if layer in spec.full_layers else _Convolution
        self._mixer = kind(spec, prefix, tower)
        self._norm = tower.make_rms_norm(f"{prefix}.operator_norm", width, spec.eps)
        self._mlp_norm = tower.make_rms_norm(f"{prefix}.ffn_norm", width, spec.eps)
        self._gate, self._up = (
            tower.make_dense(f"{prefix}.feed_forward.{name}", inner, width, bias=False)
            for name in ("w1", "w3")
        )
        self._down = tower.make_dense(f"{prefix}.feed_forward.w2", width, inner, bias=False)

    def __call__(self, x: Tensor, grid: Grid, rotation: Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        x = x + self._mixer(self._norm(x), grid, rotation)
        normed = self._mlp_norm(x)
        return x + self._down(F.silu(self._gate(normed)) * self._up(normed))


class _Attention:
    """Attention to the whole image, with norms of the heads of queries and keys."""

    def __init__(self, spec: Lfm3VlTower, prefix: str, tower: Tower) -> None:
        at, width = f"{prefix}.self_attn.", spec.hidden_size
        self._head_dim = width // spec.num_heads
        self._groups = spec.num_heads // spec.num_kv_heads
        of_keys = spec.num_kv_heads * self._head_dim
        self._qkv = [
            tower.make_dense(f"{at}{name}_proj", outputs, width, bias=False)
            for name, outputs in (("q", width), ("k", of_keys), ("v", of_keys))
        ]
        self._norms = [
            tower.make_rms_norm(f"{at}{name}_norm", self._head_dim, spec.eps) for name in "qk"
        ]
        self._out = tower.make_dense(f"{at}out_proj", width, width, bias=False)

    def __call__(self, x: Tensor, grid: Grid, rotation: Rotation) -> Tensor:
        """Returns what patches read from one another, [patches, width]."""
        q, k, v = (dense(x).unflatten(1, (-1, self._head_dim)) for dense in self._qkv)
        q, k = (rotation(norm(each)) for norm, each in zip(self._norms, (q, k), strict=True))
        k, v = (each.repeat_interleave(self._groups, 1) for each in (k, v))
        return self._out(attend(q[None], k[None], v[None])[0].flatten(1))


class _Convolution:
    """A gated convolution of each element of the stream over the rows and columns of patches."""

    def __init__(self, spec: Lfm3VlTower, prefix: str, tower: Tower) -> None:
        at, width, taps = f"{prefix}.conv.", spec.hidden_size, spec.taps
        self._size = spec.merge_size
        self._in = tower.make_dense(f"{at}in_proj", 3 * width, width, bias=False)
        self._taps = tower.tensor(f"{at}spatial_conv.weight", width, 1, taps, taps)
        self._out = tower.make_dense(f"{at}out_proj", width, width, bias=False)

    def __call__(self, x: Tensor, grid: Grid, rotation: Rotation) -> Tensor:
        """Returns what patches read from their neighbours, [patches, width]."""
        before, behind, x = self._in(x).chunk(3, -1)
        size, (_, rows, columns) = self._size, grid
        squares = (before * x).view(rows // size, columns // size, size, size, -1)
        planes = squares.permute(4, 0, 2, 1, 3).reshape(1, -1, rows, columns)
        weight = self._taps
        read = F.conv2d(planes, weight, padding=weight.shape[-1] // 2, groups=len(weight))
        return self._out(behind * in_squares(read[0].permute(1, 2, 0), size))
