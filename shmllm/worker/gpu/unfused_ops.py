"""The operations of steps of few tokens that are launched as those of many.

This module must not know what is launched together; `FusedOps` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.compressed_attention import CompressedAttention
from shmllm.models.connections import Connection
from shmllm.models.kimi_delta import KimiDelta
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Linear, Norm
from shmllm.models.per_layer import PerLayerInputs
from shmllm.worker.gpu.ops import GpuOps


class UnfusedOps(ABC):
    """Launches operations of `models.ops.Ops` as `GpuOps` does. Arguments need not be tensors.

    Args:
        ops: launches them.
    """

    def __init__(self, ops: GpuOps) -> None:
        self._ops = ops

    @abstractmethod
    def value(self, x: Any) -> Any:
        """Launch what a result is waiting for. Returns a tensor, or None for None."""

    def add_level(self, residual: Any, level: int) -> None:
        self._ops.add_level(self.value(residual), level)

    def join(self, embeds: Any, hidden: Any, norms: tuple[Norm, Norm], projection: Linear) -> Any:
        return self._ops.join(self.value(embeds), self.value(hidden), norms, projection)

    def given(self) -> Tensor:
        return self._ops.given()

    def beside(self, first: Any, second: Any) -> Tensor:
        return self._ops.beside(self.value(first), self.value(second))

    def set_aside(self, residual: Any) -> None:
        self._ops.set_aside(self.value(residual))

    def aside(self) -> Tensor:
        return self._ops.aside()

    def keep(self, residual: Any, place: int) -> None:
        self._ops.keep(self.value(residual), place)

    def clip(self, x: Any, bound: float) -> Tensor:
        return self._ops.clip(self.value(x), bound)

    def embed_per_layer(self, hidden: Any, inputs: PerLayerInputs) -> None:
        self._ops.embed_per_layer(self.value(hidden), inputs)

    def stream(self, index: int) -> Tensor:
        return self._ops.stream(index)

    def match_magnitude(self, x: Any, like: Any, out: Tensor) -> None:
        self._ops.match_magnitude(self.value(x), self.value(like), out)

    def add_to_streams(self, x: Any) -> None:
        self._ops.add_to_streams(self.value(x))

    def repeat_stream(self, residual: Any) -> None:
        self._ops.repeat_stream(self.value(residual))

    def spread(self, x: Any, connection: Connection) -> None:
        self._ops.spread(self.value(x), connection)

    def attend(self, qkv: Any, attention: AttentionHeads) -> Tensor:
        return self._ops.attend(self.value(qkv), attention)

    def store_heads(self, qkv: Any, attention: AttentionHeads) -> None:
        self._ops.store_heads(self.value(qkv), attention)

    def choose_tokens(self, x: Any, latent: Any, attention: LatentAttention) -> None:
        self._ops.choose_tokens(self.value(x), self.value(latent), attention)

    def choose_blocks(self, x: Any, attention: AttentionHeads) -> None:
        self._ops.choose_blocks(self.value(x), attention)

    def compress(self, x: Any, attention: CompressedAttention) -> None:
        self._ops.compress(self.value(x), attention)

    def attend_to_lists(self, query: Any, attention: CompressedAttention) -> Tensor:
        return self._ops.attend_to_lists(self.value(query), attention)

    def open_heads(self, x: Any, gates: Any) -> Tensor:
        return self._ops.open_heads(self.value(x), self.value(gates))

    def kimi_delta(self, x: Any, decays: Any, net: KimiDelta) -> Tensor:
        return self._ops.kimi_delta(self.value(x), self.value(decays), net)

    def gate_heads(self, x: Any, gates: Any, net: KimiDelta) -> Tensor:
        return self._ops.gate_heads(self.value(x), self.value(gates), net)
