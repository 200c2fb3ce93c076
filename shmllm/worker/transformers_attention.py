"""Attention of a module of transformers over the paged KV cache, on any device.

This module owns how queries, keys and values of a call become the rows that the operations of a
device read. It must not know which kernels these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.transformers_impl.interface import Call, UnsupportedCallError

Run = Callable[[Tensor, AttentionHeads], Tensor]
"""Computes a layer's attention, [tokens, heads * head_dim], from rows of queries, keys and values,
and stores the keys and values."""


class PagedAttention:
    """The attention function of a step.

    Args:
        layers: by the `id` of the module that calls the attention function, its layer.
        buffer: returns the buffer [max_tokens, width] for queries, keys and values side by side.
        run: the device's operation.
    """

    def __init__(
        self, layers: Mapping[int, AttentionHeads], buffer: Callable[[int], Tensor], run: Run
    ) -> None:
        self._layers = layers
        self._buffer = buffer
        self._run = run

    def __call__(self, call: Call) -> Tensor:
        """Stores a call's keys and values; returns [1, tokens, heads, value_dim]."""
        layer = self._layers[id(call.module)]
        spec = layer.spec
        asked = call.scale, call.soft_cap, call.sinks is not None
        if asked != (spec.scale, spec.soft_cap, spec.sinks):
            raise UnsupportedCallError(f"layer {layer.layer} changed what it asks of attention")
        num_tokens, value_dim = call.value.shape[2:]
        rows = self._buffer(spec.in_width)[:num_tokens]
        heads = rows.view(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        sizes = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        given = call.query, call.key, call.value
        for part, tensor in zip(heads.split_with_sizes(sizes, dim=1), given, strict=True):
            width = tensor.shape[3]
            part[..., :width] = tensor[0].transpose(0, 1)
            if width < spec.head_dim:
                part[..., width:] = 0.0
        if layer.sinks is not None and call.sinks is not None:
            layer.sinks.copy_(call.sinks)
        out = self._run(rows, layer).view(num_tokens, spec.num_heads, spec.head_dim)
        return out[..., :value_dim].to(call.query.dtype, copy=True)[None]
