"""The encoders of BART (Lewis et al., 2020) and families after it: layers of Whisper's kind, whose
norms may be behind the additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from shmllm.models.layer_keys import LayerKeys
from shmllm.models.layers import Storage
from shmllm.models.sinusoids import sinusoids
from shmllm.models.text.encoder import ENCODER, Encoder
from shmllm.models.text.specs import BartTower
from shmllm.models.text.texts import Texts
from shmllm.models.tower import ACTIVATIONS, Tower, attend

EPS = 1e-5


class BartEncoder(Encoder):
    """See `specs.BartTower`."""

    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"model.encoder.": ENCODER, ENCODER: ENCODER}
    )

    def __init__(self, spec: BartTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, num_rows = spec.hidden_size, spec.most_tokens + spec.first_position
        if spec.sinusoids is None:
            self._positions = self.tensor(f"{ENCODER}embed_positions.weight", num_rows, width)
        else:
            table = sinusoids(num_rows, width, kind=spec.sinusoids)
            self._positions = storage.constant(table.to(storage.dtype))
            self.unused = (*self.unused, f"{ENCODER}embed_positions.")
        self._embedding_norm = self._final_norm = None
        if spec.embedding_norm:
            self._embedding_norm = self.make_layer_norm(f"{ENCODER}layernorm_embedding", width, EPS)
        self._layers = [
            _BartLayer(spec, f"{ENCODER}layers.{layer}", self) for layer in range(spec.num_layers)
        ]
        if spec.is_pre_norm:
            self._final_norm = self.make_layer_norm(f"{ENCODER}layer_norm", width, EPS)
        self._keys = LayerKeys(self, spec.num_decoder_layers, width, spec.kv_width, _name_of_keys)

    def encode(self, inputs: Tensor, lengths: Sequence[int]) -> Tensor:
        spec, texts = self._spec, Texts(lengths)
        positions = self._positions[spec.first_position :]
        x = inputs * spec.embedding_scale + torch.cat([positions[:count] for count in lengths])
        if self._embedding_norm is not None:
            x = texts.each(self._embedding_norm, x)
        for layer in self._layers:
            x = layer(x, texts)
        return self._keys(x if self._final_norm is None else texts.each(self._final_norm, x))


def _name_of_keys(layer: int, kind: str) -> str:
    return f"model.decoder.layers.{layer}.encoder_attn.{kind}_proj"


class _BartLayer:
    """Attention and an MLP, each with a norm before it or behind the addition.

    Args:
        spec: what the tower computes.
        prefix: of the weights' names.
        tower: owns the weights.
    """

    def __init__(self, spec: BartTower, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._heads, self._is_pre_norm = spec.num_heads, spec.is_pre_norm
        self._activation = ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}.{name}", width, EPS)
            for name in ("self_attn_layer_norm", "final_layer_norm")
        ]
        self._qkv = [
            tower.make_dense(f"{prefix}.self_attn.{name}_proj", width, width) for name in "qkv"
        ]
        self._out = tower.make_dense(f"{prefix}.self_attn.out_proj", width, width)
        self._up = tower.make_dense(f"{prefix}.fc1", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.fc2", width, spec.inner)

    def __call__(self, x: Tensor, texts: Texts) -> Tensor:
        """Runs the layer: [all tokens, width] -> [all tokens, width]."""
        for norm, part in zip(self._norms, (self._attend, self._transform), strict=True):
            if self._is_pre_norm:
                x = x + part(texts.each(norm, x), texts)
            else:
                x = texts.each(norm, x + part(x, texts))
        if x.dtype == torch.float16:  # large activations of some checkpoints
            largest = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-largest, largest)
        return x

    def _attend(self, x: Tensor, texts: Texts) -> Tensor:
        return self._out(texts.each(self._attend_within, *(dense(x) for dense in self._qkv)))

    def _attend_within(self, *qkv: Tensor) -> Tensor:
        q, k, v = (each.view(1, len(each), self._heads, -1) for each in qkv)
        return attend(q, k, v).reshape(qkv[0].shape)

    def _transform(self, x: Tensor, texts: Texts) -> Tensor:
        return self._down(texts.each(self._activation, self._up(x)))
