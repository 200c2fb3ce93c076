"""An attention of heads as the owner of its weights. `ops.Ops` computes with them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shmllm.models.bias_specs import DistanceBiases, LinearBiases, RelationBiases
from shmllm.models.config import ModelConfig
from shmllm.models.distance_biases import linear_biases, named_biases
from shmllm.models.indexer import BlockIndexer
from shmllm.models.layers import HeadNorm, Linear, NamedWeights, Norm, Storage
from shmllm.models.matrices import joined, matrix_of
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.relations import Relations
from shmllm.models.specs import NormSpec


class AttentionHeads:
    """What attention needs of a layer once there are queries, keys and values.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        dtype: the dtype of the weights that are not packed.
        q_norm, k_norm: the norms of queries and keys, over a head or over all of them, or None.
        sinks: [num_heads], or None.
        biases: [num_heads, distances] float32, what is added to scores, or None.
        relations: what makes such biases of queries and keys, or None.
        indexer: chooses the blocks of keys that each token attends to, or None.
    """

    def __init__(self, layer: int, spec: AttentionSpec, storage: Storage) -> None:
        self.layer = layer
        self.spec = spec
        self.dtype = storage.dtype
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        self.sinks = storage.tensor(spec.num_heads) if spec.sinks else None
        self.biases: Tensor | None = None
        self.relations: Relations | None = None
        self.indexer: BlockIndexer | None = None


class Attention(AttentionHeads):
    """The weights of one layer's attention.

    Attributes:
        qkv_proj: the projections to queries, keys and values, and to gates. The rows of keys and
            of values are equal if the checkpoint has one projection for both.
        gate_proj: the projection to gates that is a product of its own, or None.
        output_norm: the norm of what `o_proj` reads, or None.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: AttentionSpec, storage: Storage
    ) -> None:
        super().__init__(layer, spec, storage)
        if isinstance(spec.biases, DistanceBiases):
            self.biases = storage.float32(spec.num_heads, spec.biases.width)
        elif isinstance(spec.biases, LinearBiases):
            of_layers, own = spec.biases, config.shard.find(spec.num_heads, spec.biases.num_heads)
            self.biases = storage.shared_constant(
                (of_layers, own), lambda: linear_biases(of_layers, own)
            )
        sizes = {"q": spec.query_width}
        if spec.source is None:
            sizes |= {"k": spec.key_width, "v": spec.value_width}
        if spec.gated:
            sizes["gate"] = spec.gate_width
        self._parts = tuple(sizes)
        lacks_some = spec.bias and not spec.key_bias
        has_all = spec.bias and not lacks_some
        in_features = spec.input_width or config.hidden_size
        self.qkv_proj = Linear(in_features, [*sizes.values()], has_all, storage)
        if lacks_some:  # the part of the keys, which no checkpoint has, stays 0
            self.qkv_proj.bias = storage.zeros(spec.in_width)
        if isinstance(spec.biases, RelationBiases):
            rest = spec.biases, config.norm, self.qkv_proj, storage
            self.relations = Relations(config.hidden_size, *rest)
        self.gate_proj: Linear | None = None
        if spec.own_gates:
            self.gate_proj = Linear(in_features, [spec.width], True, storage)
        self.indexer = BlockIndexer.of(in_features, spec, config.norm, storage)
        self.o_proj = Linear(spec.width, [config.hidden_size], spec.output_bias, storage)
        self.output_norm = Norm(spec.width, config.norm, storage) if spec.output_norm else None
        if spec.qk_norm is not None:
            has_weight = config.norm.weight and spec.norms_have_weights
            norm = replace(config.norm, weight=has_weight, bias=spec.norms_have_bias)
            of_queries = replace(norm, weight=has_weight and spec.weighs_queries)
            self.q_norm = self._norm(spec.num_heads, of_queries, storage)
            if spec.source is None:
                self.k_norm = self._norm(spec.num_kv_heads, norm, storage)

    def _norm(self, count: int, norm: NormSpec, storage: Storage) -> HeadNorm:
        """Returns the norm of so many heads."""
        spec = self.spec
        width = count * spec.head_dim if spec.qk_norm == "row" else spec.head_dim
        return HeadNorm(width, norm, storage, count if spec.qk_norm == "each" else None)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of queries, keys and what `o_proj` reads, and those of an indexer; empty if
        there are none."""
        every = [self.q_norm, self.k_norm, self.output_norm]
        if self.indexer is not None:
            every += [self.indexer.q_norm, self.indexer.k_norm]
        return tuple(norm for norm in every if norm is not None)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        prefix = f"{prefix}.self_attn"
        names = {part: f"{prefix}.{part}_proj" for part in self._parts}
        weights = self.qkv_proj.named_weights(*names.values())
        if not self.spec.key_bias:
            weights.pop(f"{names.get('k')}.bias", None)
        if self.spec.gated and not self.spec.gates_apart:
            weights |= self._with_gates(weights, names["q"], names["gate"])
        if self.spec.keys_are_values and self.spec.source is None:
            for kind in ("weight", "bias") if self.spec.bias else ("weight",):
                weights[f"{names['k']}.{kind}"] += weights.pop(f"{names['v']}.{kind}")
        weights |= self._own_gates(prefix)
        weights |= self.o_proj.named_weights(f"{prefix}.o_proj")
        named = {"q_norm": self.q_norm, "k_norm": self.k_norm, "attn_sub_norm": self.output_norm}
        for name, norm in named.items():
            if norm is not None:
                weights |= norm.named_weights(f"{prefix}.{name}")
        if self.sinks is not None:
            weights[f"{prefix}.sinks"] = (self.sinks,)
        if self.biases is not None and isinstance(self.spec.biases, DistanceBiases):
            table = named_biases(self.biases, self.spec.biases)
            weights[f"{prefix}.relative_attention_bias.weight"] = (table,)
        return weights | self._named_parts(prefix)

    def _named_parts(self, prefix: str) -> NamedWeights:
        """Returns the destinations of what decides which keys are read, and how."""
        weights: NamedWeights = {}
        if self.relations is not None:
            weights |= self.relations.named_weights(prefix)
        if self.indexer is not None:
            weights |= self.indexer.named_weights(f"{prefix}.indexer")
        return weights

    def _own_gates(self, prefix: str) -> NamedWeights:
        """Returns the destinations of gates that are a product of their own; all elements of a head
        have its bias."""
        if self.gate_proj is None:
            return {}
        assert self.gate_proj.bias is not None, "it has one"
        of_heads = self.gate_proj.bias.unflatten(0, (self.spec.num_heads, -1))
        return {
            f"{prefix}.gate_proj.weight": (self.gate_proj.weight,),
            f"{prefix}.gate_bias": of_heads.unbind(1),
        }

    def _with_gates(self, weights: NamedWeights, queries: str, gates: str) -> NamedWeights:
        """Returns the destinations of queries and gates under one name, each head's query and
        gate side by side."""
        joint: NamedWeights = {}
        sizes = [self.spec.head_dim] * self.spec.num_heads
        for kind in ("weight", "bias") if self.spec.bias else ("weight",):
            views = [matrix_of(weights.pop(f"{name}.{kind}")) for name in (queries, gates)]
            heads = zip(*(view.split_with_sizes(sizes) for view in views), strict=True)
            joint[f"{queries}.{kind}"] = (joined([part for pair in heads for part in pair]),)
        return joint
