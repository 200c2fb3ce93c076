"""A latent attention on a GPU: its kernels, and the products with a matrix for each head.

Steps of few tokens have kernels for those products and their neighbours; others have torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Linear
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.worker.gpu.attention import AttentionStep
from shmllm.worker.gpu.attention_launches import HeadShape
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm_kernels.gpu.indexer import choose_tokens, store_index_keys
from shmllm_kernels.gpu.latent_attention import attend_parts, paged_latent_attention
from shmllm_kernels.gpu.latent_heads import absorb_queries, project_values
from shmllm_kernels.gpu.latent_write import write_latents
from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.reference.rope_write import QueryGrowth


class LatentAttentionOps:
    """Launches the operations of `models.ops.Ops` on latents.

    Args:
        cache: the KV cache.
        inputs: the step's inputs.
        buffers: the buffers for the results.
    """

    def __init__(self, cache: GpuKVCache, inputs: GpuInputs, buffers: GpuBuffers) -> None:
        self._cache = cache
        self._inputs = inputs
        self._buffers = buffers

    def begin(self, step: AttentionStep) -> None:
        """See `AttentionOps.begin`."""
        self._step = step

    def store(self, x: Tensor, attention: LatentAttention) -> Tensor:
        """See `models.ops.Ops.store_latents`."""
        write_latents(**self._written(x, attention))
        return x

    def choose(
        self,
        x: Tensor,
        latent: Tensor,
        attention: LatentAttention,
        linear: Callable[[Tensor, Linear], Tensor],
    ) -> None:
        """See `models.ops.Ops.choose_tokens`; ``linear`` launches its products."""
        indexer = attention.indexer
        assert indexer is not None, "the layer has an indexer"
        norm = indexer.key_norm
        assert norm.bias is not None, "it is a LayerNorm"
        group, _, cache = self._cache.layers[attention.layer]
        cos, sin = (table[: len(x)] for table in self._buffers.angles[attention.spec.rope])
        rotation = cos, sin
        store_index_keys(
            cache[:, :, 0],
            linear(x, indexer.key),
            norm.weight,
            norm.bias,
            norm.spec.eps,
            *rotation,
            self._inputs.step.slots[group, : len(x)],
            indexer.spec.interleaved,
        )
        weights, query = linear(x, indexer.head_weights), linear(latent, indexer.query)
        heads = query.unflatten(1, (indexer.spec.num_heads, -1))
        self._step.launch(partial(self._choose, heads, weights, rotation, attention))

    def _choose(
        self,
        query: Tensor,
        weights: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: LatentAttention,
    ) -> None:
        """Choose tokens for queries [tokens, heads, dim] with weights of heads [tokens, heads]."""
        indexer, choice, inputs = attention.indexer, self._buffers.choice, self._inputs
        assert indexer is not None, "the layer has an indexer"
        assert choice is not None, "the model has indexers"
        num_reqs = self._step.descriptor.num_reqs
        group, _, cache = self._cache.layers[attention.layer]
        choose_tokens(
            choice.table[: len(query), 0],
            choice.starts[: len(query) + 1],
            choice.lens[: len(query)],
            query,
            weights,
            cache[:, :, 0],
            *rotation,
            inputs.block_tables[group, :num_reqs],
            inputs.step.query_starts[: num_reqs + 1],
            inputs.step.context_lens[:num_reqs],
            choice.scores[:, 0],
            indexer.spec.interleaved,
        )

    def attend(self, query: Tensor, attention: LatentAttention) -> Tensor:
        """See `models.ops.Ops.attend_to_latents`."""
        spec = attention.spec
        latents, rotated = self._project(query, attention)
        self._step.launch(partial(self._attend, latents, rotated, attention))
        out = self._buffers.attended(spec.width)[: len(latents)]
        multiply_heads(out.unflatten(1, (spec.num_heads, -1)), latents, attention.value_up)
        return _opened(out, query, spec)

    def attend_few(self, query: Tensor, x: Tensor, attention: LatentAttention) -> Tensor:
        """Compute `store` of ``x`` and `attend` for few tokens."""
        spec = attention.spec
        heads = _heads_of(query, spec)
        latents = self._buffers.latents(spec.latent_width)[: len(query)]
        latents = latents.unflatten(1, (spec.num_heads, -1))
        absorb_queries(
            latents,
            heads,
            attention.key_up,
            **self._written(x, attention),
            is_dependent=self._step.is_dependent,
        )
        out = self._buffers.attended(spec.width)[: len(query)]
        rotated = heads[..., spec.nope_dim :]
        self._step.launch(partial(self._attend_few, out, latents, rotated, attention))
        return _opened(out, query, spec)

    def _written(self, x: Tensor, attention: LatentAttention) -> dict[str, Any]:
        """Return the arguments of `write_latents`."""
        rope, norm = attention.spec.rope, attention.kv_norm
        group, rows, _ = self._cache.layers[attention.layer]
        cos, sin = (table[: len(x)] for table in self._buffers.angles[rope])
        return {
            "cache": rows[:, :, 0],
            "x": x[:, -attention.spec.key_dim :],
            "weight": norm.weight,
            "eps": norm.spec.eps,
            "cos": cos,
            "sin": sin,
            "slots": self._inputs.step.slots[group, : len(x)],
            "interleaved": rope.interleaved,
        }

    def _project(self, query: Tensor, attention: LatentAttention) -> tuple[Tensor, Tensor]:
        """Return queries projected to the width of a latent, [tokens, heads, rank], and the rotated
        parts of queries, [tokens, heads, rope_dim]."""
        spec, num_tokens = attention.spec, len(query)
        heads = _heads_of(query, spec)
        rotated = heads[..., spec.nope_dim :]
        _, rows, _ = self._cache.layers[attention.layer]
        unwritten = rows[..., spec.rank :]
        slots = self._inputs.step.slots[0, :num_tokens]
        cos, sin = (table[:num_tokens] for table in self._buffers.angles[spec.rope])
        is_interleaved = spec.rope.interleaved
        rope_and_write(
            rotated, unwritten, unwritten, rotated, cos, sin, slots, interleaved=is_interleaved
        )
        latents = self._buffers.latents(spec.latent_width)[:num_tokens]
        latents = latents.unflatten(1, (spec.num_heads, -1))
        multiply_heads(latents, heads[..., : spec.nope_dim], attention.key_up)
        return latents, rotated

    def _attend(self, latents: Tensor, rotated: Tensor, attention: LatentAttention) -> None:
        """Replace latent queries by the attention's output."""
        paged_latent_attention(**self._attended(latents, rotated, attention))

    def _attend_few(
        self, out: Tensor, latents: Tensor, rotated: Tensor, attention: LatentAttention
    ) -> None:
        """Compute the attention, and project it to values, [tokens, heads * value_dim]."""
        is_dependent, arguments = (
            self._step.is_dependent,
            self._attended(latents, rotated, attention),
        )
        attend_parts(**arguments, is_dependent=is_dependent)
        attended = arguments["out"]
        project_values(
            out[: len(attended)],
            attended,
            attention.value_up,
            arguments["query_starts"],
            arguments["num_splits"],
            arguments["scratch"],
            is_dependent,
        )

    def _attended(
        self, latents: Tensor, rotated: Tensor, attention: LatentAttention
    ) -> dict[str, Any]:
        """Return the arguments of `paged_latent_attention`."""
        inputs, step = self._inputs, self._step.descriptor
        num_reqs, growth = step.num_reqs, attention.spec.growth
        num_tokens = num_reqs if step.uniform else len(latents)
        group, rows, _ = self._cache.layers[attention.layer]
        heads, choice = HeadShape.of(attention.spec), None
        if heads.is_chosen:  # each token is a request
            choice, num_reqs = self._buffers.choice, num_tokens
        starts, lens = inputs.step.query_starts, inputs.step.context_lens
        table = inputs.block_tables[group]
        if choice is not None:
            table, starts, lens = choice.table[:, 0], choice.starts, choice.lens
        launch = self._step.launches[heads]
        return {
            "out": latents[:num_tokens],
            "query": latents[:num_tokens],
            "rope_query": rotated[:num_tokens],
            "cache": rows[:, :, 0],
            "block_table": table[:num_reqs],
            "has_slots": choice is not None,
            "query_starts": starts[: num_reqs + 1],
            "context_lens": lens[:num_reqs],
            "config": launch.config,
            "scale": attention.spec.scale,
            "growth": None if growth is None else QueryGrowth(*growth),
            "sinks": attention.sinks,
            "num_splits": launch.num_splits,
            "scratch": self._buffers.scratch(heads, num_tokens, launch.num_splits),
        }


def _heads_of(query: Tensor, spec: LatentAttentionSpec) -> Tensor:
    """Return the queries among some columns, [tokens, heads, nope_dim + rope_dim]."""
    heads: Tensor = query[:, : spec.query_width].unflatten(1, (spec.num_heads, -1))
    return heads


def _opened(out: Tensor, query: Tensor, spec: LatentAttentionSpec) -> Tensor:
    """Return outputs [tokens, heads * value_dim], times the sigmoids of gates behind queries, in
    place, if there are some."""
    gates = query[:, spec.query_width :]
    return out.mul_(gates.sigmoid_()) if spec.gates_of_elements else out


def multiply_heads(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compute ``out[:, head] = x[:, head] @ weight[head].T``, all [tokens, heads, ...], without
    allocating memory."""
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
