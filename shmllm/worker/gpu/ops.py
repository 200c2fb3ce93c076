"""A decoder's operations on a GPU: each call launches kernels on buffers of the step's size.

This module owns which kernel computes an operation. It must not know requests, nor whether a launch
is executed or captured; it knows only that attention may be kept out of captures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Attention, Linear
from shmllm.models.rope import attention_factor, inverse_frequencies
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.piecewise_graph import Call
from shmllm_kernels.gpu.activation import silu_and_mul
from shmllm_kernels.gpu.attention import paged_attention
from shmllm_kernels.gpu.norm import add_rms_norm, rms_norm
from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.gpu.step import embed, gather_rows, rope_tables


def call_now(call: Call) -> None:
    """Launch attention at once."""
    call()


def multiply(out: Tensor, x: Tensor, linear: Linear) -> None:
    """Compute ``out = x @ weight.T + bias`` without allocating memory."""
    weight = linear.weight
    assert isinstance(weight, Tensor)  # `check_model` refuses others
    if linear.bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x, weight.t(), out=out)


class GpuOps:
    """Launches the operations of `models.ops.Ops`. The launches' arguments depend only on the sizes
    given to `begin`, and not on the contents of the device's memory.

    Args:
        config: the model's configuration.
        cache: the KV cache.
        inputs: the step's inputs.
        buffers: the buffers for the results.
        device: the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: GpuKVCache,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: torch.device,
    ) -> None:
        self._config = config
        self._cache = cache
        self._inputs = inputs
        self._buffers = buffers
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._factor = attention_factor(config.rope)
        self._scale = config.head_dim**-0.5
        self.begin(BatchDescriptor(1, 1, True), 1)

    def begin(
        self,
        descriptor: BatchDescriptor,
        max_query_len: int,
        launch_attention: Callable[[Call], None] = call_now,
    ) -> None:
        """Set the sizes of the next forward pass.

        Args:
            descriptor: the padded sizes of the step.
            max_query_len: the largest number of tokens of a request; ignored for uniform steps.
            launch_attention: called with each launch of attention, at once or to launch it in each
                replay. A later launch uses the sizes of the latest call of `begin`, except the
                number of tokens.
        """
        self._descriptor = descriptor
        self._launch_attention = launch_attention
        self._attention = self._buffers.attention.choose(descriptor, max_query_len)

    def embed(self, table: Tensor) -> Tensor:
        num_tokens, step = self._descriptor.num_tokens, self._inputs.step
        out = self._buffers.hidden[:num_tokens]
        embed(out, table, step.token_ids[:num_tokens], self._inputs.last_tokens)
        rope_tables(
            *self._angles(num_tokens), step.positions[:num_tokens], self._frequencies, self._factor
        )
        return out

    def add_rms_norm(
        self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        out = self._buffers.normed[: len(residual)]
        if x is None:
            rms_norm(out, residual, weight, eps)
        else:
            add_rms_norm(out, x, residual, weight, eps)
        return out

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        out = self._buffers.product(linear.weight.shape[0])[: len(x)]
        multiply(out, x, linear)
        return out

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        num_tokens, num_heads = len(qkv), self._config.num_heads
        heads = qkv.view(num_tokens, -1, self._config.head_dim)
        query = heads[:, :num_heads]  # rotated in place
        q_norm, k_norm = attention.norms
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm, attention.eps)
        group, keys, values = self._cache.layers[attention.layer]
        slots = self._inputs.step.slots[group, :num_tokens]
        rope_and_write(query, keys, values, heads, *self._angles(num_tokens), slots, norms)
        out = self._buffers.attended[:num_tokens]
        attended = out.view(num_tokens, num_heads, self._config.head_dim)
        self._launch_attention(partial(self._attend, attended, query, attention.layer))
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = self._buffers.activated[: len(gate_up)]
        silu_and_mul(out, gate_up)
        return out

    def gather_samples(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states of the tokens that get logits, padded to the step's number of
        requests."""
        num_samples = self._descriptor.num_reqs
        out = self._buffers.sampled[:num_samples]
        gather_rows(out, hidden, self._inputs.step.sample_tokens[:num_samples])
        return out

    def _angles(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        return self._buffers.cos[:num_tokens], self._buffers.sin[:num_tokens]

    def _attend(self, out: Tensor, query: Tensor, layer: int) -> None:
        inputs, launch, num_reqs = self._inputs, self._attention, self._descriptor.num_reqs
        num_tokens = num_reqs if self._descriptor.uniform else len(query)
        group, keys, values = self._cache.layers[layer]
        paged_attention(
            out[:num_tokens],
            query[:num_tokens],
            keys,
            values,
            inputs.block_tables[group, :num_reqs],
            inputs.step.query_starts[: num_reqs + 1],
            inputs.step.context_lens[:num_reqs],
            launch.config,
            self._scale,
            window=self._config.layer_windows[layer],
            num_splits=launch.num_splits,
            scratch=self._buffers.scratch(num_tokens, launch.num_splits),
            masks_all=launch.masks_all,
        )
