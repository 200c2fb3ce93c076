"""The decoder that all architectures share: pre-norm blocks of attention and gated MLP.

Owns the order of operations and the names of weights. Knows no requests, and not how anything is
computed: that is `ops`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.layers import MLP, Attention, NamedWeights, Storage, TokenEmbedding
from shmllm.models.ops import Ops
from shmllm.models.weight_update import update_weights


class DecoderModel:
    """Embedding, blocks, final norm and logits. An architecture is a subclass.

    The two class attributes are what architectures differ in beyond their config.

    Attributes:
        qk_norm: query and key heads are normalised before the rotation.
        output_bias: the attention's output projection has a bias where q, k and v have one.
        config: what the model was built from.
        dtype: of weights and activations.
        weights_version: counts the updates of weights since they were first loaded.
        missing: names of the weights that were lost with their memory and not written since.
        is_asleep: the memory of the weights is not there: nobody may read or write them.
    """

    qk_norm: ClassVar[bool] = False
    output_bias: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, storage: Storage) -> None:
        self.config = config
        self.dtype = storage.dtype
        self.weights_version = 0
        self.missing: set[str] = set()
        self.is_asleep = False
        hidden = config.hidden_size
        tied = config.tie_word_embeddings
        self.embedding = TokenEmbedding(config.vocab_size, hidden, tied, storage)
        output_bias = self.output_bias and config.attention_bias
        self.layers = [
            DecoderLayer(config, layer, self.qk_norm, output_bias, storage)
            for layer in range(config.num_layers)
        ]
        self.norm = storage.tensor(hidden)

    def forward(self, ops: Ops) -> Tensor:
        """One step's tokens through all blocks.

        Returns:
            [tokens, hidden] after the final norm, for the product with `embedding.head`.
        """
        residual = ops.embed(self.embedding.table)
        x: Tensor | None = None
        for layer in self.layers:
            x = layer(ops, x, residual)
        return ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)

    def weights_changed(self, names: Iterable[str]) -> None:
        """To be called by whoever wrote weights, between two steps, with their names."""
        self.missing.difference_update(names)
        self.weights_version += 1

    def check_awake(self) -> None:
        """Raise RequestError unless weights may be read and written."""
        if self.is_asleep:
            raise RequestError("the weights are asleep: wake_up(tags=['weights']) first")

    def weights_lost(self) -> None:
        """To be called by whoever gave their memory back: all are missing until written."""
        self.missing = set(self.named_weights())

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Overwrites weights in place; see ``weight_update.update_weights``."""
        return update_weights(self, named_tensors)

    def named_weights(self) -> NamedWeights:
        """Where each tensor of a Hugging Face checkpoint goes.

        Returns:
            Name to views of the checkpoint's shape. ``view.copy_(tensor)`` on each of a
            name's views loads or updates that weight, ``view.clone()`` reads it.
        """
        weights = self.embedding.named_weights()
        for index, layer in enumerate(self.layers):
            weights |= layer.named_weights(f"model.layers.{index}")
        weights["model.norm.weight"] = (self.norm,)
        return weights


class DecoderLayer:
    """Attention and MLP, each behind a norm that also takes in the last block's output."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qk_norm: bool,
        output_bias: bool,
        storage: Storage,
    ) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = storage.tensor(config.hidden_size)
        self.attention = Attention(config, layer, qk_norm, output_bias, storage)
        self.post_attention_norm = storage.tensor(config.hidden_size)
        self.mlp = MLP(config, storage)

    def __call__(self, ops: Ops, x: Tensor | None, residual: Tensor) -> Tensor:
        """x, the last block's output, is still to be added to the residual stream, and so is
        what is returned: [tokens, hidden]."""
        attention, mlp = self.attention, self.mlp
        normed = ops.add_rms_norm(x, residual, self.input_norm, self.eps)
        attended = ops.attend(ops.linear(normed, attention.qkv_proj), attention)
        x = ops.linear(attended, attention.o_proj)
        normed = ops.add_rms_norm(x, residual, self.post_attention_norm, self.eps)
        activated = ops.silu_and_mul(ops.linear(normed, mlp.gate_up_proj))
        return ops.linear(activated, mlp.down_proj)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Destinations under ``prefix``, e.g. "model.layers.0"."""
        weights = self.attention.named_weights(f"{prefix}.self_attn")
        weights |= self.mlp.named_weights(f"{prefix}.mlp")
        weights[f"{prefix}.input_layernorm.weight"] = (self.input_norm,)
        weights[f"{prefix}.post_attention_layernorm.weight"] = (self.post_attention_norm,)
        return weights
