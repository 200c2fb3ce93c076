"""A latent attention on a GPU: its kernels, and the products with a matrix for each head.

Steps of few tokens have kernels for those products and their neighbours; others have torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shmllm.models.latent_attention import LatentAttention
from shmllm.worker.gpu.attention_launches import AttentionLaunch, HeadShape
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm_kernels.gpu.latent_attention import attend_parts, paged_latent_attention
from shmllm_kernels.gpu.latent_heads import absorb_queries, project_values
from shmllm_kernels.gpu.latent_write import write_latents
from shmllm_kernels.gpu.rope_write import rope_and_write


class LatentAttentionOps:
    """Launches the parts of `models.ops.Ops.attend_to_latents`, and `store_latents`.

    Args:
        cache: the KV cache.
        inputs: the step's inputs.
        buffers: the buffers for the results.
    """

    def __init__(self, cache: GpuKVCache, inputs: GpuInputs, buffers: GpuBuffers) -> None:
        self._cache = cache
        self._inputs = inputs
        self._buffers = buffers

    def store(self, x: Tensor, attention: LatentAttention) -> None:
        """Normalise latents, rotate key parts, and write both to the cache."""
        write_latents(**self._written(x, attention))

    def _written(self, x: Tensor, attention: LatentAttention) -> dict[str, Any]:
        """Return the arguments of `write_latents`."""
        rope, norm = attention.spec.rope, attention.kv_norm
        group, rows, _ = self._cache.layers[attention.layer]
        cos, sin = (table[: len(x)] for table in self._buffers.angles[rope])
        return {
            "cache": rows[:, :, 0],
            "x": x,
            "weight": norm.weight,
            "eps": norm.spec.eps,
            "cos": cos,
            "sin": sin,
            "slots": self._inputs.step.slots[group, : len(x)],
            "interleaved": rope.interleaved,
        }

    def project(self, query: Tensor, attention: LatentAttention) -> tuple[Tensor, Tensor]:
        """Return what `attend` takes of queries [tokens, heads * (nope_dim + rope_dim)]."""
        spec, num_tokens = attention.spec, len(query)
        heads = query.unflatten(1, (spec.num_heads, -1))
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
        _multiply_heads(latents, heads[..., : spec.nope_dim], attention.key_up)
        return latents, rotated

    def project_few(
        self, query: Tensor, x: Tensor, attention: LatentAttention, is_dependent: bool
    ) -> tuple[Tensor, Tensor]:
        """Do what `store` does with ``x``, and return what `project` does, in one launch.

        Args:
            query, x: of few tokens.
            attention: the layer.
            is_dependent: whether the launch begins before the one before it has ended.
        """
        spec = attention.spec
        heads = query.unflatten(1, (spec.num_heads, -1))
        latents = self._buffers.latents(spec.latent_width)[: len(query)]
        latents = latents.unflatten(1, (spec.num_heads, -1))
        absorb_queries(
            latents,
            heads,
            attention.key_up,
            **self._written(x, attention),
            is_dependent=is_dependent,
        )
        return latents, heads[..., spec.nope_dim :]

    def attend(
        self,
        latents: Tensor,
        rotated: Tensor,
        attention: LatentAttention,
        step: BatchDescriptor,
        launch: AttentionLaunch,
    ) -> None:
        """Replace latent queries by the attention's output.

        Args:
            latents: [tokens, heads, rank], queries projected to the width of a latent.
            rotated: [tokens, heads, rope_dim], the rotated parts of queries.
            attention: the layer.
            step: the padded sizes of the step.
            launch: the choice for these heads.
        """
        paged_latent_attention(**self._attended(latents, rotated, attention, step, launch))

    def attend_few(
        self,
        out: Tensor,
        latents: Tensor,
        rotated: Tensor,
        attention: LatentAttention,
        step: BatchDescriptor,
        launch: AttentionLaunch,
        is_dependent: bool,
    ) -> None:
        """Compute the attention of few tokens, and project it to values, in two launches.

        Args:
            out: [tokens, heads * value_dim].
            latents, rotated, attention, step, launch: see `attend`.
            is_dependent: see `project_few`.
        """
        arguments = self._attended(latents, rotated, attention, step, launch)
        attend_parts(**arguments, is_dependent=is_dependent)
        attended = arguments["out"]
        project_values(
            out[: len(attended)],
            attended,
            attention.value_up,
            arguments["query_starts"],
            step.num_reqs,
            launch.num_splits,
            arguments["scratch"],
            is_dependent,
        )

    def _attended(
        self,
        latents: Tensor,
        rotated: Tensor,
        attention: LatentAttention,
        step: BatchDescriptor,
        launch: AttentionLaunch,
    ) -> dict[str, Any]:
        """Return the arguments of `paged_latent_attention`."""
        inputs, num_reqs = self._inputs, step.num_reqs
        num_tokens = num_reqs if step.uniform else len(latents)
        group, rows, _ = self._cache.layers[attention.layer]
        heads = HeadShape.of(attention.spec)
        return {
            "out": latents[:num_tokens],
            "query": latents[:num_tokens],
            "rope_query": rotated[:num_tokens],
            "cache": rows[:, :, 0],
            "block_table": inputs.block_tables[group, :num_reqs],
            "query_starts": inputs.step.query_starts[: num_reqs + 1],
            "context_lens": inputs.step.context_lens[:num_reqs],
            "config": launch.config,
            "scale": attention.spec.scale,
            "num_splits": launch.num_splits,
            "scratch": self._buffers.scratch(heads, num_tokens, launch.num_splits),
        }

    def to_values(self, latents: Tensor, attention: LatentAttention) -> Tensor:
        """Project the attention's output to values, [tokens, heads * value_dim]."""
        spec = attention.spec
        out = self._buffers.attended(spec.width)[: len(latents)]
        _multiply_heads(out.unflatten(1, (spec.num_heads, -1)), latents, attention.value_up)
        return out


def _multiply_heads(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compute ``out[:, head] = x[:, head] @ weight[head].T``, all [tokens, heads, ...], without
    allocating memory."""
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
