"""A latent attention as the owner of its weights. `ops.Ops` computes with them.

It is in the absorbed form: the part of each head's query that does not rotate is projected to the
width of a latent, by the transpose of what would project latents to keys, and the attention's
output is projected to values. So latents are read as they lie in the cache.
"""

from __future__ import annotations

from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.indexer import Indexer
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.matrices import Matrix, MixedMatrix, joined
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.models.specs import NormSpec


class LatentAttention:
    """The weights of one layer's latent attention.

    Attributes:
        layer: the index of the layer.
        spec: what it computes.
        in_proj: the projection to `LatentAttentionSpec.first_widths`, side by side.
        query_norm: the norm of what queries are a projection of, or None.
        query_up: the projection to `LatentAttentionSpec.up_widths`, of that or of the hidden state;
            None: `in_proj` returns queries.
        kv_norm: the norm of latents.
        key_up: [heads, rank, nope_dim], the projection of each head's query to a latent's width.
        value_up: [heads, value_dim, rank], the projection of each head's output to a value.
        indexer: chooses the tokens that each token attends to; None: the layer has none of its
            own.
        gate_proj: the projection to the gates of heads, or None.
        sinks: [heads] float32, or None.
        o_proj: the output projection.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: LatentAttentionSpec, storage: Storage
    ) -> None:
        self.layer = layer
        self.spec = spec
        hidden, rank, norm = config.hidden_size, spec.query_rank, NormSpec(eps=spec.norm_eps)
        self.in_proj = Linear(hidden, spec.first_widths, spec.bias, storage)
        self.query_norm = None if rank is None else Norm(rank, norm, storage)
        self.query_up: Linear | None = None
        if spec.projects_queries:
            read = spec.joined_rank or rank or hidden
            self.query_up = Linear(read, spec.up_widths, False, storage)
        self.kv_norm = Norm(spec.rank, norm, storage)
        self.key_up = storage.tensor(spec.num_heads, spec.rank, spec.nope_dim)
        self.value_up = storage.tensor(spec.num_heads, spec.value_dim, spec.rank)
        self.indexer: Indexer | None = None
        if spec.indexer is not None and not spec.indexer.is_shared:
            assert rank is not None, "an indexer reads what queries are a projection of"
            self.indexer = Indexer(hidden, rank, spec.indexer, storage)
        self.gate_proj: Linear | None = None
        if spec.gated:
            self.gate_proj = Linear(hidden, [spec.num_heads * spec.gates_per_head], False, storage)
        self.sinks = storage.float32(spec.num_heads) if spec.sinks else None
        self.o_proj = Linear(spec.width, [hidden], spec.bias, storage)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of latents, of what queries are a projection of, and of an indexer's keys."""
        others = None if self.indexer is None else self.indexer.key_norm
        return tuple(norm for norm in (self.kv_norm, self.query_norm, others) if norm is not None)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        prefix = f"{prefix}.self_attn"
        query, up = ("q_proj", "q_proj") if self.query_norm is None else ("q_a_proj", "q_b_proj")
        firsts = [f"{prefix}.{query}", f"{prefix}.kv_a_proj_with_mqa"]
        weights = self.in_proj.named_weights(*firsts[-len(self.spec.first_widths) :])
        if self.gate_proj is not None:
            weights |= self.gate_proj.named_weights(f"{prefix}.g_proj")
        if self.sinks is not None:
            weights[f"{prefix}.sinks"] = (self.sinks,)
        if self.query_norm is not None:
            weights |= self.query_norm.named_weights(f"{prefix}.q_a_layernorm")
        if self.spec.gates_of_elements:
            weights[f"{prefix}.{up}.weight"] = (self._queries_and_gates(),)
        elif self.query_up is not None:
            weights |= self.query_up.named_weights(f"{prefix}.{up}")
        weights |= self.kv_norm.named_weights(f"{prefix}.kv_a_layernorm")
        if self.indexer is not None:
            weights |= self.indexer.named_weights(f"{prefix}.indexer")
        if self.spec.kv_apart:
            weights[f"{prefix}.k_b_proj.weight"] = (self.key_up,)
            weights[f"{prefix}.v_b_proj.weight"] = (self.value_up,)
        else:
            weights[f"{prefix}.kv_b_proj.weight"] = (self._kv_up(),)
        return weights | self.o_proj.named_weights(f"{prefix}.o_proj")

    def _queries_and_gates(self) -> Matrix:
        """Returns the projection to queries and gates with those of a head side by side."""
        assert self.query_up is not None, "it makes the gates"
        spec, sizes = self.spec, (self.spec.nope_dim + self.spec.rope_dim, self.spec.value_dim)
        parts = self.query_up.weight.split_with_sizes(self.query_up.out_features)
        heads = zip(
            *(
                part.split_with_sizes([size] * spec.num_heads)
                for part, size in zip(parts, sizes, strict=True)
            ),
            strict=True,
        )
        return joined([part for pair in heads for part in pair])

    def _kv_up(self) -> MixedMatrix:
        """Returns the projections of latents to all heads' keys and values, [heads * (nope_dim +
        value_dim), rank]: the rows of a key and those of a value for each head."""
        parts: list[Tensor] = []
        for key_up, value_up in zip(self.key_up, self.value_up, strict=True):
            parts += [key_up.t(), value_up]
        return MixedMatrix(parts)
