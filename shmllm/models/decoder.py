"""The decoder that all architectures share: pre-norm blocks of attention and gated MLP.

This module owns the order of operations and the names of weights. It must not know requests, nor
how an operation is computed, which is the task of `ops.Ops`.
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
    """Embedding, blocks, final norm and LM head. Each architecture is a subclass.

    Architectures differ in their config and in the two class attributes.

    Attributes:
        qk_norm: whether query and key heads are normalised before the rotary embedding.
        output_bias: whether the attention's output projection has a bias if q, k and v have one.
        config: the configuration that the model was built from.
        dtype: the dtype of weights and activations.
        weights_version: the number of weight updates since the first load.
        missing: the names of weights whose contents were dropped with their memory and that have
            not been written since.
        num_losses: how often the contents of all weights were dropped.
        is_asleep: whether the memory of the weights is released. They must not be read or
            written then.
    """

    qk_norm: ClassVar[bool] = False
    output_bias: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, storage: Storage) -> None:
        self.config = config
        self.dtype = storage.dtype
        self.weights_version = 0
        self.missing: set[str] = set()
        self.num_losses = 0
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
        """Runs one step's tokens through all blocks and the final norm.

        Returns:
            [tokens, hidden], the input of `embedding.head`.
        """
        residual = ops.embed(self.embedding.table)
        x: Tensor | None = None
        for layer in self.layers:
            x = layer(ops, x, residual)
        return ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)

    def weights_changed(self, names: Iterable[str]) -> None:
        """Records that weights were written. The writer calls this, between two steps.

        Args:
            names: the names of the weights that were written.
        """
        self.missing.difference_update(names)
        self.weights_version += 1

    def check_awake(self) -> None:
        """Raises RequestError if the memory of the weights is released."""
        if self.is_asleep:
            raise RequestError("the weights are asleep: wake_up(tags=['weights']) first")

    def weights_lost(self) -> None:
        """Records that the contents of all weights were dropped with their memory."""
        self.missing = set(self.named_weights())
        self.num_losses += 1

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Overwrites weights in place; see `weight_update.update_weights`.

        Raises:
            RequestError: the weights are asleep, or a tensor was refused.
        """
        self.check_awake()
        tied = self.config.tie_word_embeddings
        written = update_weights(self.named_weights(), named_tensors, tied)
        if written:
            self.weights_changed(written)
        return written

    def named_weights(self) -> NamedWeights:
        """Returns the destinations of each tensor of a Hugging Face checkpoint.

        Returns:
            A mapping from the checkpoint's name to views of the checkpoint's shape.
            ``view.copy_(tensor)`` on each of a name's views loads or updates that weight,
            ``view.clone()`` reads it.
        """
        weights = self.embedding.named_weights()
        for index, layer in enumerate(self.layers):
            weights |= layer.named_weights(f"model.layers.{index}")
        weights["model.norm.weight"] = (self.norm,)
        return weights


class DecoderLayer:
    """One block: attention and MLP, each after a norm fused with the residual addition."""

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
        """Runs the block.

        Args:
            ops: the operations of the device.
            x: [tokens, hidden], the output of the previous block, which this block adds to
                ``residual``; None in the first block.
            residual: [tokens, hidden], the residual stream, changed in place.

        Returns:
            [tokens, hidden], which the next norm adds to ``residual``.
        """
        attention, mlp = self.attention, self.mlp
        normed = ops.add_rms_norm(x, residual, self.input_norm, self.eps)
        attended = ops.attend(ops.linear(normed, attention.qkv_proj), attention)
        x = ops.linear(attended, attention.o_proj)
        normed = ops.add_rms_norm(x, residual, self.post_attention_norm, self.eps)
        activated = ops.silu_and_mul(ops.linear(normed, mlp.gate_up_proj))
        return ops.linear(activated, mlp.down_proj)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        weights = self.attention.named_weights(f"{prefix}.self_attn")
        weights |= self.mlp.named_weights(f"{prefix}.mlp")
        weights[f"{prefix}.input_layernorm.weight"] = (self.input_norm,)
        weights[f"{prefix}.post_attention_layernorm.weight"] = (self.post_attention_norm,)
        return weights
