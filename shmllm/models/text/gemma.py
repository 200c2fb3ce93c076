"""The encoder of T5Gemma: Gemma 2's layers (Gemma Team, 2024), whose attention looks both ways, and
a table of embeddings of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from shmllm.models.layer_keys import LayerKeys
from shmllm.models.layers import Storage, rounded
from shmllm.models.rope import attention_factor, inverse_frequencies
from shmllm.models.text.encoder import ENCODER, Encoder
from shmllm.models.text.specs import GemmaTower
from shmllm.models.text.texts import Texts
from shmllm.models.tower import ACTIVATIONS, Tower

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [tokens, head_dim]; the sines of the first half are negative."""


class GemmaEncoder(Encoder):
    """See `specs.GemmaTower`."""

    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({"model.encoder.": ENCODER})
    unused = ()

    def __init__(self, spec: GemmaTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec, width = spec, spec.hidden_size
        self.table = self.tensor(f"{ENCODER}embed_tokens.weight", spec.vocab_size, width)
        self._scale = rounded(spec.embedding_scale, storage.dtype)
        self._frequencies = storage.constant(inverse_frequencies(spec.rope))
        self._layers = [
            _GemmaLayer(spec, window, f"{ENCODER}layers.{index}", self)
            for index, window in enumerate(spec.windows)
        ]
        self._norm = self.make_rms_norm(f"{ENCODER}norm", width, spec.eps, offset=1.0)
        sizes = spec.num_decoder_layers, width, spec.kv_width
        biases = "kv" if spec.keys_have_bias else ""
        self._keys = LayerKeys(self, *sizes, _name_of_keys, biases=biases)

    def encode(self, inputs: Tensor, lengths: Sequence[int]) -> Tensor:
        texts, rotation = Texts(lengths), self._rotation(max(lengths))
        x = inputs * self._scale
        for layer in self._layers:
            x = layer(x, texts, rotation)
        return self._keys(texts.each(self._norm, x))

    def _rotation(self, count: int) -> Rotation:
        angles = torch.arange(count, device=self._frequencies.device)[:, None] * self._frequencies
        factor = attention_factor(self._spec.rope)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat([cos, cos], 1).to(self.dtype), torch.cat([-sin, sin], 1).to(self.dtype)


def _name_of_keys(layer: int, kind: str) -> str:
    return f"model.decoder.layers.{layer}.cross_attn.{kind}_proj"


class _GemmaLayer:
    """Attention and an MLP, each with a norm before and behind it.

    Args:
        spec: what the tower computes.
        window: how far from its own position a token attends at most; None: to all.
        prefix: of the weights' names.
        tower: owns the weights.
    """

    def __init__(self, spec: GemmaTower, window: int | None, prefix: str, tower: Tower) -> None:
        self._spec, self._window = spec, window
        width, attention, mlp = spec.hidden_size, f"{prefix}.self_attn", f"{prefix}.mlp"
        self._norms = [
            tower.make_rms_norm(f"{prefix}.{place}_{part}_layernorm", width, spec.eps, offset=1.0)
            for part in ("self_attn", "feedforward")
            for place in ("pre", "post")
        ]
        of_keys = spec.num_kv_heads * spec.head_dim
        self._q, self._k, self._v = (
            tower.make_dense(f"{attention}.{name}_proj", size, width, bias=spec.has_bias)
            for name, size in (("q", spec.width), ("k", of_keys), ("v", of_keys))
        )
        self._out = tower.make_dense(f"{attention}.o_proj", width, spec.width, bias=spec.has_bias)
        self._gate, self._up = (
            tower.make_dense(f"{mlp}.{name}_proj", spec.inner, width, bias=False)
            for name in ("gate", "up")
        )
        self._down = tower.make_dense(f"{mlp}.down_proj", width, spec.inner, bias=False)
        self._activation = ACTIVATIONS[spec.activation]

    def __call__(self, x: Tensor, texts: Texts, rotation: Rotation) -> Tensor:
        """Runs the layer: [all tokens, width] -> [all tokens, width]."""
        normed = texts.each(self._norms[0], x)
        attend = partial(self._attend_within, rotation)
        attended = texts.each(attend, self._q(normed), self._k(normed), self._v(normed))
        x = x + texts.each(self._norms[1], self._out(attended))
        normed = texts.each(self._norms[2], x)
        activated = texts.each(self._activation, self._gate(normed)) * self._up(normed)
        return x + texts.each(self._norms[3], self._down(activated))

    def _attend_within(self, rotation: Rotation, *qkv: Tensor) -> Tensor:
        spec, count = self._spec, len(qkv[0])
        q, k, v = (each.view(count, -1, spec.head_dim) for each in qkv)
        cos, sin = (table[:count, None] for table in rotation)
        q, k = (each * cos + each.roll(spec.head_dim // 2, -1) * sin for each in (q, k))
        per_key = spec.num_heads // spec.num_kv_heads
        k, v = (each.repeat_interleave(per_key, 1).transpose(0, 1) for each in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        if self._window is not None:
            places = torch.arange(count, device=scores.device)
            is_far = (places - places[:, None]).abs() > self._window
            scores = scores.masked_fill(is_far, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).transpose(0, 1).reshape(count, -1)
