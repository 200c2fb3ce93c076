"""The encoders of T5 (Raffel et al., 2020), mT5 and UMT5. Those that are models of their own
are in `models/families/t5_encoder.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from shmllm.models.distance_biases import bucket_of
from shmllm.models.layer_keys import LayerKeys
from shmllm.models.layers import Storage
from shmllm.models.text.encoder import ENCODER, Encoder
from shmllm.models.text.specs import T5Tower
from shmllm.models.text.texts import Texts
from shmllm.models.tower import ACTIVATIONS, Tower, attend

_BIASES = "SelfAttention.relative_attention_bias.weight"


class T5Encoder(Encoder):
    """See `specs.T5Tower`."""

    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({ENCODER: ENCODER})

    def __init__(self, spec: T5Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width = spec.hidden_size
        blocks = [f"{ENCODER}block.{index}.layer" for index in range(spec.num_layers)]
        self._layers = [_T5Layer(spec, block, self) for block in blocks]
        with_biases = blocks[:1] if spec.shares_biases else blocks
        shape = spec.biases.num_buckets, spec.num_heads
        self._biases = [self.tensor(f"{block}.0.{_BIASES}", *shape) for block in with_biases]
        self._norm = self.make_rms_norm(f"{ENCODER}final_layer_norm", width, spec.eps)
        self._keys = LayerKeys(
            self, spec.num_decoder_layers, width, spec.kv_width, _name_of_keys, biases=""
        )

    def encode(self, inputs: Tensor, lengths: Sequence[int]) -> Tensor:
        places = torch.arange(max(lengths), device=inputs.device)
        buckets = bucket_of(places - places[:, None], self._spec.biases)
        found = [table[buckets].permute(2, 0, 1)[None] for table in self._biases]
        x, texts = inputs, Texts(lengths)
        for index, layer in enumerate(self._layers):
            x = layer(x, texts, found[0 if self._spec.shares_biases else index])
        return self._keys(texts.each(self._norm, x))


def _name_of_keys(layer: int, kind: str) -> str:
    return f"decoder.block.{layer}.layer.1.EncDecAttention.{kind}"


class _T5Layer:
    """Attention and an MLP, each behind a norm.

    Args:
        spec: what the tower computes.
        prefix: of the weights' names.
        tower: owns the weights.
    """

    def __init__(self, spec: T5Tower, prefix: str, tower: Tower) -> None:
        width, of_heads, mlp = spec.hidden_size, spec.width, f"{prefix}.1.DenseReluDense"
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_rms_norm(f"{prefix}.{part}.layer_norm", width, spec.eps) for part in range(2)
        ]
        self._qkv = [
            tower.make_dense(f"{prefix}.0.SelfAttention.{name}", of_heads, width, bias=False)
            for name in "qkv"
        ]
        self._out = tower.make_dense(f"{prefix}.0.SelfAttention.o", width, of_heads, bias=False)
        names = ("wi_0", "wi_1") if spec.gated else ("wi",)
        self._ups = [
            tower.make_dense(f"{mlp}.{name}", spec.inner, width, bias=False) for name in names
        ]
        self._down = tower.make_dense(f"{mlp}.wo", width, spec.inner, bias=False)

    def __call__(self, x: Tensor, texts: Texts, biases: Tensor) -> Tensor:
        """Runs the layer: [all tokens, width] -> [all tokens, width].

        Args:
            x: the tokens.
            texts: which texts they are of.
            biases: [1, heads, tokens, tokens] of the longest text, added to the scores.
        """
        normed = texts.each(self._norms[0], x)
        qkv = (dense(normed) for dense in self._qkv)
        attended = texts.each(partial(self._attend_within, biases), *qkv)
        x = _bounded(x + self._out(attended))
        normed = texts.each(self._norms[1], x)
        activated = texts.each(self._activation, self._ups[0](normed))
        for up in self._ups[1:]:
            activated = activated * up(normed)
        return _bounded(x + self._down(activated))

    def _attend_within(self, biases: Tensor, *qkv: Tensor) -> Tensor:
        count = len(qkv[0])
        q, k, v = (each.view(1, count, self._heads, -1) for each in qkv)
        return attend(q, k, v, 1.0, biases[..., :count, :count]).reshape(qkv[0].shape)


def _bounded(x: Tensor) -> Tensor:
    """Returns the stream with bounds where half precision needs them."""
    if x.dtype != torch.float16:
        return x
    largest = torch.finfo(x.dtype).max - 1000
    return x.clamp(-largest, largest)
