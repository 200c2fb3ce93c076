"""The decoder that all architectures share: pre-norm blocks of attention and gated MLP.

Knows tensors of one step and no requests: which tokens belong together, and where their
keys and values are kept, is the business of the attention function that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.layers import (
    Allocator,
    Linear,
    NamedWeights,
    TokenEmbedding,
    as_checkpoints_do,
)
from shmllm.models.products import MakeProduct, Product
from shmllm.models.rope import RotaryEmbedding
from shmllm.models.weight_update import update_weights
from shmllm_kernels import add_rms_norm, apply_rope, rms_norm, rotate, silu_and_mul

Activation = Callable[[Tensor], Tensor]
"""[tokens, 2 * inner] -> [tokens, inner]; computes what `silu_and_mul` does."""


class AttentionFn(Protocol):
    """Stores keys and values, and attends causally to those stored.

    Scores are scaled by ``head_dim ** -0.5``; windows follow ``ModelConfig.layer_windows``.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the layer.
            query: [tokens, num_heads, head_dim]; may be a strided view, like key and value.
            key: [tokens, num_kv_heads, head_dim].
            value: [tokens, num_kv_heads, head_dim].

        Returns:
            [tokens, num_heads * head_dim].
        """


class Attention:
    """Projections, per-head norms where the architecture has them, and rotary embedding."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qk_norm: bool,
        output_bias: bool,
        dtype: torch.dtype,
        allocate: Allocator,
    ) -> None:
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.num_qk_heads = config.num_heads + config.num_kv_heads
        self.num_qkv_heads = sum(self.heads)
        widths = [heads * config.head_dim for heads in self.heads]
        self.qkv_proj = Linear(config.hidden_size, widths, config.attention_bias, dtype, allocate)
        self.o_proj = Linear(widths[0], [config.hidden_size], output_bias, dtype, allocate)
        self.q_norm = allocate((config.head_dim,), dtype) if qk_norm else None
        self.k_norm = allocate((config.head_dim,), dtype) if qk_norm else None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        heads = self.qkv_proj(x).view(-1, self.num_qkv_heads, self.head_dim)
        query, key = self._rotated(heads, cos, sin)
        value = heads[:, self.num_qk_heads :]
        return self.o_proj(attention(self.layer, query, key, value))

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            both = rotate(heads[:, : self.num_qk_heads], cos, sin)
            return both[:, : self.num_heads], both[:, self.num_heads :]
        query = rms_norm(heads[:, : self.num_heads], self.q_norm, self.eps)
        key = rms_norm(heads[:, self.num_heads : self.num_qk_heads], self.k_norm, self.eps)
        return apply_rope(query, key, cos, sin)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Destinations under ``prefix``, e.g. "model.layers.0.self_attn"."""
        projections = [f"{prefix}.{name}_proj" for name in "qkv"]
        weights = self.qkv_proj.named_weights(*projections)
        weights |= self.o_proj.named_weights(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            weights[f"{prefix}.q_norm.weight"] = (self.q_norm,)
            weights[f"{prefix}.k_norm.weight"] = (self.k_norm,)
        return weights


class MLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up fused."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, allocate: Allocator) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation: Activation = silu_and_mul
        self.gate_up_proj = Linear(hidden, [inner, inner], bias, dtype, allocate)
        self.down_proj = Linear(inner, [hidden], bias, dtype, allocate)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def named_weights(self, prefix: str) -> NamedWeights:
        """Destinations under ``prefix``, e.g. "model.layers.0.mlp"."""
        weights = self.gate_up_proj.named_weights(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return weights | self.down_proj.named_weights(f"{prefix}.down_proj")


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

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        allocate: Allocator,
        device: torch.device | str,
        will_pack: bool = False,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.weights_version = 0
        self.missing: set[str] = set()
        self.is_asleep = False
        self._products: list[Product] = []
        self._is_derived = True
        hidden = config.hidden_size
        tied = config.tie_word_embeddings
        self.embedding = TokenEmbedding(config.vocab_size, hidden, tied, dtype, allocate)
        self.rope = RotaryEmbedding(config.rope, config.head_dim, dtype, device)
        output_bias = self.output_bias and config.attention_bias
        in_layers = as_checkpoints_do(allocate) if will_pack else allocate
        self.layers = [
            DecoderLayer(config, layer, self.qk_norm, output_bias, dtype, in_layers)
            for layer in range(config.num_layers)
        ]
        self.norm = allocate((hidden,), dtype)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """Runs the tokens of one step through all blocks.

        Args:
            token_ids: [tokens] int64.
            positions: [tokens] int64, each token's place in its sequence.
            attention: called once per layer, in order.
            embedded: [tokens, hidden] instead of what ``embed(token_ids)`` would give; is
                overwritten.

        Returns:
            [tokens, hidden] after the final norm.
        """
        cos, sin = self.rope(positions)
        hidden = self.embed(token_ids) if embedded is None else embedded
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin, attention)
        if residual is None:
            return rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return add_rms_norm(hidden, residual, self.norm, self.config.rms_norm_eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 -> [tokens, hidden]."""
        return self.embedding.embed(token_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] as ``forward`` returns them -> [rows, vocab] float32."""
        return self.embedding.logits(hidden)

    def use_products(self, make: MakeProduct) -> None:
        """Multiply with all matrices in another way from now on."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        self._products = [linear.use(make) for linear in linears] + [self.embedding.use(make)]
        self._is_derived = False

    def use_activation(self, activation: Activation) -> None:
        """Compute the MLPs' activation in another way from now on."""
        for layer in self.layers:
            layer.mlp.activation = activation

    def weights_changed(self, names: Iterable[str]) -> None:
        """To be called by whoever wrote weights, between two steps, with their names."""
        self.missing.difference_update(names)
        self.weights_version += 1
        self._is_derived = False

    def check_awake(self) -> None:
        """Raise RequestError unless weights may be read and written."""
        if self.is_asleep:
            raise RequestError("the weights are asleep: wake_up(tags=['weights']) first")

    def weights_lost(self) -> None:
        """To be called by whoever gave their memory back: all are missing until written."""
        self.missing = set(self.named_weights())
        self._is_derived = False

    def derive(self) -> None:
        """Make anew what is derived from the weights, if they changed since or it was dropped.
        Has to precede a forward pass; costs nothing where there is nothing to do."""
        if not self._is_derived:
            for product in self._products:
                product.derive()
            self._is_derived = True

    def drop_derived(self) -> None:
        """Give back the memory of what is derived from the weights."""
        for product in self._products:
            product.drop()
        self._is_derived = False

    @property
    def derived_bytes(self) -> int:
        """Memory of what is derived from the weights."""
        return sum(product.derived_bytes for product in self._products)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Overwrites weights in place; see ``weight_update.update_weights``."""
        return update_weights(self, named_tensors)

    def named_weights(self) -> NamedWeights:
        """Where each tensor of a Hugging Face checkpoint goes.

        Returns:
            Name to views of the checkpoint's shape. ``view.copy_(tensor)`` on each of a
            name's views loads or updates that weight.
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
        dtype: torch.dtype,
        allocate: Allocator,
    ) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = allocate((config.hidden_size,), dtype)
        self.attention = Attention(config, layer, qk_norm, output_bias, dtype, allocate)
        self.post_attention_norm = allocate((config.hidden_size,), dtype)
        self.mlp = MLP(config, dtype, allocate)

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionFn,
    ) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] and the residual stream -> both, the last addition still pending."""
        if residual is None:
            normed, residual = rms_norm(hidden, self.input_norm, self.eps), hidden
        else:
            normed = add_rms_norm(hidden, residual, self.input_norm, self.eps)
        hidden = self.attention(normed, cos, sin, attention)
        normed = add_rms_norm(hidden, residual, self.post_attention_norm, self.eps)
        return self.mlp(normed), residual

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order of use."""
        attention, mlp = self.attention, self.mlp
        return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj

    def named_weights(self, prefix: str) -> NamedWeights:
        """Destinations under ``prefix``, e.g. "model.layers.0"."""
        weights = self.attention.named_weights(f"{prefix}.self_attn")
        weights |= self.mlp.named_weights(f"{prefix}.mlp")
        weights[f"{prefix}.input_layernorm.weight"] = (self.input_norm,)
        weights[f"{prefix}.post_attention_layernorm.weight"] = (self.post_attention_norm,)
        return weights
