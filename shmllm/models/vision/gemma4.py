"""The tower of Gemma 4: an encoder with norms on both sides of attention and MLPs, means of squares
of patches, a norm and a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, RMSNorm, Tower, attend
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import patches_in_squares, places_in_squares
from shmllm.models.vision.squares_specs import Gemma4Tower

_ENCODER = "vision_tower."
_PATCHES = f"{_ENCODER}patch_embedder."


class Gemma4(Tower):
    """See `specs.Gemma4Tower`."""

    def __init__(self, spec: Gemma4Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self.input_dtype = torch.float32  # pixels are shifted before they are rounded
        self._spec = spec
        width = spec.hidden_size
        self._patches = self.make_dense(
            f"{_PATCHES}input_proj", width, 3 * spec.patch_size**2, bias=False
        )
        self._positions = self.tensor(
            f"{_PATCHES}position_embedding_table", 2, spec.longest_side, width
        )
        self._layers = [
            _Layer(spec, f"{_ENCODER}encoder.layers.{layer}", self)
            for layer in range(spec.num_layers)
        ]
        self._shift: Tensor | None = None
        self._scale: Tensor | None = None
        if spec.standardizes:
            self._shift = self.tensor(f"{_ENCODER}std_bias", width)
            self._scale = self.tensor(f"{_ENCODER}std_scale", width)
            self.neutral_weights += [(self._shift, 0.0), (self._scale, 1.0)]
        self._norm = RMSNorm(None, spec.eps)
        self._project = self.make_dense(
            "embed_vision.embedding_projection", hidden_size, width, bias=False
        )

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        patches = patches_in_squares(pixels, grid, self._spec)
        places = places_in_squares(grid, self._spec.merge_size, pixels.device)
        x = self._embed(patches, places)
        rotation = _Rotation(places, self._spec)
        for layer in self._layers:
            x = layer(x, rotation)
        return self._project(self._norm(self._pool(x)))

    def _embed(self, patches: Tensor, places: Tensor) -> Tensor:
        centred = 2 * (patches.permute(0, 2, 3, 4, 1).flatten(1).float() - 0.5)
        rows, columns = places.unbind(1)
        positions = self._positions[0][columns] + self._positions[1][rows]
        return self._patches(centred.to(self.dtype)) + positions

    def _pool(self, x: Tensor) -> Tensor:
        """Returns the means of squares, [squares, width], computed in float32."""
        squares = x.float().unflatten(0, (-1, self._spec.merge_size**2))
        pooled: Tensor = squares.mean(1).to(x.dtype).float() * self._spec.hidden_size**0.5
        if self._shift is not None and self._scale is not None:
            pooled = (pooled - self._shift.float()) * self._scale.float()
        return pooled.to(x.dtype)


class _Rotation:
    """The rotation of heads: of the first half by columns, of the second one by rows (Su et al.,
    2021).

    Args:
        places: [patches, 2], rows and columns.
        spec: what the tower computes.
    """

    def __init__(self, places: Tensor, spec: Gemma4Tower) -> None:
        half = spec.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half
        frequencies = 1.0 / spec.theta**exponents
        angles = (places.flip(1)[..., None].float() * frequencies)[:, None]
        self._cos, self._sin = angles.cos(), angles.sin()  # [patches, 1, 2, head_dim / 4]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x`` [patches, heads, head_dim], rotated in float32."""
        first, second = x.float().unflatten(-1, (2, 2, -1)).unbind(-2)
        turned = first * self._cos - second * self._sin, second * self._cos + first * self._sin
        return torch.stack(turned, -2).flatten(-3).to(x.dtype)


class _Layer:
    """One layer: attention and an MLP, each between norms."""

    def __init__(self, spec: Gemma4Tower, prefix: str, tower: Tower) -> None:
        self._spec, self._activation = spec, ACTIVATIONS[spec.activation]
        width, heads = spec.hidden_size, spec.num_heads * spec.head_dim
        kv_heads = spec.num_kv_heads * spec.head_dim

        def norm(name: str, width: int) -> RMSNorm:
            return tower.make_rms_norm(f"{prefix}.{name}", width, spec.eps)

        self._before_attention = norm("input_layernorm", width)
        self._behind_attention = norm("post_attention_layernorm", width)
        self._before_mlp = norm("pre_feedforward_layernorm", width)
        self._behind_mlp = norm("post_feedforward_layernorm", width)
        self._norms = [
            norm("self_attn.q_norm", spec.head_dim), norm("self_attn.k_norm", spec.head_dim),
            RMSNorm(None, spec.eps),
        ]  # fmt: skip
        self._q, self._k, self._v, self._out = (
            tower.make_clipped(f"{prefix}.self_attn.{name}_proj", *shape, spec.clips)
            for name, shape in {
                "q": (heads, width), "k": (kv_heads, width), "v": (kv_heads, width),
                "o": (width, heads),
            }.items()
        )  # fmt: skip
        self._gate, self._up, self._down = (
            tower.make_clipped(f"{prefix}.mlp.{name}_proj", *shape, spec.clips)
            for name, shape in {
                "gate": (spec.inner, width), "up": (spec.inner, width),
                "down": (width, spec.inner),
            }.items()
        )  # fmt: skip

    def __call__(self, x: Tensor, rotation: _Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        read = self._attend(self._before_attention(x), rotation)
        x = x + self._behind_attention(self._out(read))
        normed = self._before_mlp(x)
        inner = self._activation(self._gate(normed)) * self._up(normed)
        return x + self._behind_mlp(self._down(inner))

    def _attend(self, x: Tensor, rotation: _Rotation) -> Tensor:
        spec = self._spec
        q, k, v = (
            norm(dense(x).unflatten(1, (-1, spec.head_dim)))
            for norm, dense in zip(self._norms, (self._q, self._k, self._v), strict=True)
        )
        q, k = rotation(q), rotation(k)
        k, v = (each.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for each in (k, v))
        return attend(q[None], k[None], v[None], scale=1.0)[0].flatten(1)
