"""The encoders of CLIP, SigLIP and BLIP-2: what they share, and the weights of both.

Their names are those that transformers' modules have below the encoder.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.encoder_spec import EncoderSpec, LayerSpec
from shmllm.models.vision.tiles import patches_of_tile


class Encoder:
    """An encoder of images of one size.

    Args:
        spec: what it computes.
        prefix: of its weights' names, such as "vision_tower.".
        tower: owns the weights.
        is_joined: see `EncoderLayer`.
    """

    def __init__(
        self, spec: EncoderSpec, prefix: str, tower: Tower, *, is_joined: bool = False
    ) -> None:
        self.spec = spec
        is_clip, width, size = spec.kind == "clip", spec.hidden_size, spec.patch_size
        at = f"{prefix}embeddings"
        has_class = spec.kind in ("clip", "blip")
        self._class = tower.tensor(f"{at}.class_embedding", width) if has_class else None
        self._patches = tower.make_dense(
            f"{at}.patch_embedding", width, 3, size, size, bias=not is_clip
        )
        self._positions = tower.tensor(
            f"{at}.position_embedding.weight", spec.side**2 + has_class, width
        )
        self._first_norm = (
            tower.make_layer_norm(f"{prefix}pre_layrnorm", width, spec.eps) if is_clip else None
        )
        self._layers = [
            EncoderLayer(spec, f"{prefix}encoder.layers.{layer}", tower, is_joined=is_joined)
            for layer in range(spec.num_layers)
        ]
        self._final_norm = (
            tower.make_layer_norm(f"{prefix}post_layernorm", width, spec.eps)
            if spec.final_norm
            else None
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        """Computes the features of one tile: [3, height, width] -> [patches, width], behind the
        class token if there is one.

        Raises:
            ValueError: the tile has another size.
        """
        return self.with_inner(pixels, ())[0]

    def with_inner(self, pixels: Tensor, wanted: Collection[int]) -> tuple[Tensor, list[Tensor]]:
        """Computes what a call does, and what the layers `wanted` return, which count from 0."""
        inner = []
        x = self._embed(pixels)
        for index, layer in enumerate(self._layers):
            x = layer(x)
            if index in wanted:
                inner.append(x)
        return (x if self._final_norm is None else self._final_norm(x)), inner

    def _embed(self, pixels: Tensor) -> Tensor:
        patches = patches_of_tile(pixels, self.spec.image_size, self.spec.patch_size)
        x = self._patches(patches.to(self._positions.dtype))
        if self._class is not None:
            x = torch.cat([self._class[None], x])
        x = x + self._rows_of_positions()
        return x if self._first_norm is None else self._first_norm(x)

    def _rows_of_positions(self) -> Tensor:
        """Returns the position embeddings of the patches of a tile."""
        if not self.spec.nearest_rows:
            return self._positions
        side, device = self.spec.side, self._positions.device
        ends = torch.arange(1 / side, 1.0, 1 / side, device=device)
        step = 1.0 / torch.full((), side, device=device)  # a tensor of a number would be copied
        places = (torch.arange(side, dtype=torch.float32, device=device) * step).clamp(max=1 - 1e-6)
        rows = torch.bucketize(places, ends, right=True)
        return self._positions[(rows[:, None] * side + rows).flatten()]


class EncoderLayer:
    """One layer: attention and an MLP, each behind a norm.

    Args:
        spec: what it computes.
        prefix: of its weights' names, without a dot.
        tower: owns the weights.
        is_joined: whether queries, keys and values are one projection, in the memory of which each
            has a name.
    """

    def __init__(
        self, spec: LayerSpec, prefix: str, tower: Tower, *, is_joined: bool = False
    ) -> None:
        width = spec.hidden_size
        self._heads = spec.num_heads
        self._activation = ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}.layer_norm{number}", width, spec.eps)
            for number in (1, 2)
        ]
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        self._qkv = (
            [tower.make_joined(names, width, width)]
            if is_joined
            else [tower.make_dense(name, width, width) for name in names]
        )
        self._out = tower.make_dense(f"{prefix}.self_attn.out_proj", width, width)
        self._up = tower.make_dense(f"{prefix}.mlp.fc1", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.mlp.fc2", width, spec.inner)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        normed = self._norms[0](x)
        parts = (part for dense in self._qkv for part in dense(normed).split(x.shape[1], 1))
        q, k, v = (part.view(1, len(x), self._heads, -1) for part in parts)
        x = x + self._out(attend(q, k, v).reshape(x.shape))
        return x + self._down(self._activation(self._up(self._norms[1](x))))
