"""The layers of a decoder as owners of weights. `ops.Ops` computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.quantized import Int8Matrix

Allocator = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns a tensor of the given shape and dtype, whose contents are undefined."""

Matrix = Tensor | Int8Matrix

NamedWeights = dict[str, tuple[Matrix, ...]]
"""A mapping from a weight's name in the checkpoint to the views that hold it. Each view has the
checkpoint's shape, and `shape`, `dtype`, `device`, `numel`, `copy_` and `clone`."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Allocates a model's weights.

    Attributes:
        allocate: returns the memory of one tensor.
        dtype: the dtype of the weights.
        rounds: whether the matrices of matrix products are rounded to 8 bits.
    """

    allocate: Allocator
    dtype: torch.dtype
    rounds: bool = False

    def tensor(self, *shape: int) -> Tensor:
        """Allocates a weight that is never quantized."""
        return self.allocate(shape, self.dtype)

    def matrix(self, *shape: int) -> Matrix:
        """Allocates the [out, in] matrix of a matrix product."""
        rows, width = shape
        if self.rounds:
            return Int8Matrix.make((rows, width), self.dtype, self.allocate)
        return self.tensor(rows, width)


class Linear:
    """One or several projections of the same input, fused into one product.

    Args:
        in_features: the width of the input.
        out_features: the width of each projection; their outputs lie side by side.
        bias: whether the projections have a bias.
        storage: allocates the weights.

    Attributes:
        weight: [out, in], as checkpoints store it, one projection after the other.
        bias: [out] or None.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], bias: bool, storage: Storage
    ) -> None:
        self.out_features = tuple(out_features)
        width = sum(self.out_features)
        self.weight = storage.matrix(width, in_features)
        self.bias = storage.tensor(width) if bias else None

    def named_weights(self, *names: str) -> NamedWeights:
        """Returns views of each projection's [out, in] weight and [out] bias, by its name."""
        weights: NamedWeights = {}
        parts: Sequence[Matrix] = self.weight.split_with_sizes(self.out_features)
        for name, part in zip(names, parts, strict=True):
            weights[f"{name}.weight"] = (part,)
        if self.bias is not None:
            biases = self.bias.split_with_sizes(self.out_features)
            for name, bias in zip(names, biases, strict=True):
                weights[f"{name}.bias"] = (bias,)
        return weights


class Attention:
    """The projections of one layer's attention, and the per-head norms of some architectures.

    Attributes:
        layer: the index of the layer.
        q_norm, k_norm: the weights of the norms, [head_dim], or None.
        norms: q_norm and k_norm.
        eps: the epsilon of these norms.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qk_norm: bool,
        output_bias: bool,
        storage: Storage,
    ) -> None:
        self.layer = layer
        self.eps = config.rms_norm_eps
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        widths = [number * config.head_dim for number in heads]
        self.qkv_proj = Linear(config.hidden_size, widths, config.attention_bias, storage)
        self.o_proj = Linear(widths[0], [config.hidden_size], output_bias, storage)
        self.q_norm = storage.tensor(config.head_dim) if qk_norm else None
        self.k_norm = storage.tensor(config.head_dim) if qk_norm else None
        self.norms = self.q_norm, self.k_norm

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as
        "model.layers.0.self_attn"."""
        projections = [f"{prefix}.{name}_proj" for name in "qkv"]
        weights = self.qkv_proj.named_weights(*projections)
        weights |= self.o_proj.named_weights(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            weights[f"{prefix}.q_norm.weight"] = (self.q_norm,)
            weights[f"{prefix}.k_norm.weight"] = (self.k_norm,)
        return weights


class MLP:
    """The weights of ``down(silu(gate(x)) * up(x))``, with gate and up fused."""

    def __init__(self, config: ModelConfig, storage: Storage) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, [inner, inner], bias, storage)
        self.down_proj = Linear(inner, [hidden], bias, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0.mlp"."""
        weights = self.gate_up_proj.named_weights(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return weights | self.down_proj.named_weights(f"{prefix}.down_proj")


class TokenEmbedding:
    """The embedding table and the LM head, which shares the table in tied models.

    Attributes:
        table: [vocab, hidden].
        head: the projection of hidden states to logits.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        storage: Storage,
    ) -> None:
        self.tied = tied
        self.table = storage.tensor(vocab_size, hidden_size)
        if tied and not storage.rounds:
            storage = replace(storage, allocate=lambda shape, dtype: self.table)
        self.head = Linear(hidden_size, [vocab_size], False, storage)

    def named_weights(self) -> NamedWeights:
        """Returns the destinations of both matrices, [vocab, hidden].

        A tied model has one name. In a quantized tied model that name has two destinations: the
        table, and the rounded copy that the LM head multiplies with.
        """
        if not self.tied:
            table: NamedWeights = {"model.embed_tokens.weight": (self.table,)}
            return table | self.head.named_weights("lm_head")
        copies = () if self.head.weight is self.table else (self.head.weight,)
        return {"model.embed_tokens.weight": (self.table, *copies)}
