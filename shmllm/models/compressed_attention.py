"""A compressed attention as the owner of its weights. `compressed_ops.CompressedOps` computes with
them."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from shmllm.models.compressed_specs import CompressedAttentionSpec, CompressionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.specs import NormSpec


class EntryWeights:
    """What makes entries of the values and gates of tokens.

    Attributes:
        bias: [rate, width] float32, added to the gates of each token by its place in a window.
        norm: the norm of an entry.
    """

    def __init__(self, dim: int, spec: CompressionSpec, norm: NormSpec, storage: Storage) -> None:
        self.bias = storage.float32(spec.rate, spec.widths(dim)[1])
        self.norm = Norm(dim, norm, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``."""
        return {f"{prefix}.position_bias": (self.bias,)} | self.norm.named_weights(
            f"{prefix}.kv_norm"
        )


class EntryIndexer:
    """What chooses entries. The positive factors of its scores change no order, and are left out.

    Attributes:
        query: the projection to all heads' queries.
        head_weights: the projection of the hidden state to a weight for each head.
        entries: what makes its keys.
    """

    def __init__(
        self, hidden: int, spec: CompressedAttentionSpec, norm: NormSpec, storage: Storage
    ) -> None:
        assert spec.indexer is not None, "the layer has one"
        assert spec.compression is not None, "it chooses entries"
        heads, dim = spec.indexer.num_heads, spec.indexer.head_dim
        self.query = Linear(spec.query_rank, [heads * dim], False, storage)
        self.head_weights = Linear(hidden, [heads], False, storage.exact())
        self.entries = EntryWeights(dim, spec.compression, norm, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``."""
        weights = self.query.named_weights(f"{prefix}.q_b_proj")
        weights |= self.head_weights.named_weights(f"{prefix}.scorer.weights_proj")
        return weights | self.entries.named_weights(prefix)


class CompressedAttention:
    """The weights of one layer's compressed attention.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projection to `CompressedAttentionSpec.first_widths`, side by side.
        query_norm: the norm of what queries are a projection of.
        query_up: the projection of that to queries.
        key_norm: the norm of keys.
        part_proj: the projection to `CompressedAttentionSpec.parts`; None: there are no entries.
        entries: what makes entries of these, likewise.
        indexer: what chooses entries; None: all are read.
        sinks: [heads] float32, the scores of keys without values.
        group_proj: [groups, group_rank, width of the heads of a group], the projections of groups.
        o_proj: the output projection.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: CompressedAttentionSpec, storage: Storage
    ) -> None:
        self.layer: Final = layer
        self.spec: Final = spec
        hidden, norm = config.hidden_size, NormSpec(eps=spec.norm_eps)
        self.in_proj = Linear(hidden, spec.first_widths, False, storage)
        self.query_norm = Norm(spec.query_rank, norm, storage)
        self.query_up = Linear(spec.query_rank, [spec.query_width], False, storage)
        self.key_norm = Norm(spec.head_dim, norm, storage)
        self.part_proj: Linear | None = None
        self.entries: EntryWeights | None = None
        self.indexer: EntryIndexer | None = None
        if spec.compression is not None:
            self.part_proj = Linear(hidden, spec.parts, False, storage.exact())
            self.entries = EntryWeights(spec.head_dim, spec.compression, norm, storage)
        if spec.indexer is not None:
            self.indexer = EntryIndexer(hidden, spec, norm, storage)
        self.sinks: Tensor = storage.float32(spec.num_heads)
        of_group = spec.query_width // spec.groups
        self.group_proj: Tensor = storage.tensor(spec.groups, spec.group_rank, of_group)
        self.o_proj = Linear(spec.width, [hidden], False, storage)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of what queries are a projection of, of keys and of entries."""
        of_entries = [] if self.entries is None else [self.entries.norm]
        of_index = [] if self.indexer is None else [self.indexer.entries.norm]
        return (self.query_norm, self.key_norm, *of_entries, *of_index)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        prefix = f"{prefix}.self_attn"
        weights = self.in_proj.named_weights(f"{prefix}.q_a_proj", f"{prefix}.kv_proj")
        weights |= self.query_norm.named_weights(f"{prefix}.q_a_norm")
        weights |= self.query_up.named_weights(f"{prefix}.q_b_proj")
        weights |= self.key_norm.named_weights(f"{prefix}.kv_norm")
        of_entries, of_index = f"{prefix}.compressor", f"{prefix}.compressor.indexer"
        if self.part_proj is not None and self.entries is not None:
            names = [
                f"{place}.{kind}_proj"
                for place in (of_entries, of_index)
                for kind in ("kv", "gate")
            ]
            weights |= self.part_proj.named_weights(*names[: len(self.spec.parts)])
            weights |= self.entries.named_weights(of_entries)
        if self.indexer is not None:
            weights |= self.indexer.named_weights(of_index)
        weights[f"{prefix}.sinks"] = (self.sinks,)
        weights[f"{prefix}.o_a_proj.weight"] = (self.group_proj.flatten(0, 1),)
        return weights | self.o_proj.named_weights(f"{prefix}.o_b_proj")
