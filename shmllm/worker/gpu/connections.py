"""Hyper-connections between several residual streams on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.connections import Connection
from shmllm.models.layers import Allocator
from shmllm_kernels.gpu.connections import GateNumbers, fold, num_parts, spread


@dataclass(frozen=True)
class ConnectionOps:
    """Launches the operations of `models.ops.Ops` on streams that are connected to layers.

    Attributes:
        streams: [max_tokens, streams * hidden], the streams of a token side by side.
        gates: [max_tokens, 2 * streams] float32, the gates of a connection.
        parts: [max_tokens, parts, 2 * streams + 1] float32, scratch memory of its product.
        folded: [max_tokens, hidden], the buffer of sums of streams.
    """

    streams: Tensor
    gates: Tensor
    parts: Tensor
    folded: Tensor

    @classmethod
    def allocate(
        cls, allocate: Allocator, config: ModelConfig, folded: Tensor
    ) -> ConnectionOps | None:
        """Return the operations with their buffers, or None if no stream is connected."""
        if config.connections is None:
            return None
        rows, hidden = folded.shape
        count = config.connections.num_streams
        joined, num_gates = count * hidden, 2 * count
        return cls(
            allocate((rows, joined), folded.dtype),
            allocate((rows, num_gates), torch.float32),
            allocate((rows, num_parts(joined), num_gates + 1), torch.float32),
            folded,
        )

    def repeat(self, residual: Tensor) -> None:
        """Launch `Ops.repeat_stream`."""
        streams = self.streams[: len(residual)].unflatten(1, (-1, residual.shape[1]))
        streams.copy_(residual.unsqueeze(1))

    def fold(self, num_tokens: int, connection: Connection) -> Tensor:
        """Launch `Ops.fold_streams` for so many tokens."""
        spec, matrix = connection.spec, connection.logits.weight
        assert isinstance(matrix, Tensor), "it is never quantized"
        out, gates, streams, parts = (
            each[:num_tokens] for each in (self.folded, self.gates, self.streams, self.parts)
        )
        numbers = GateNumbers(spec.norm_eps, spec.magnitude, spec.eps)
        fold(out, gates, streams, parts, matrix, connection.scale, connection.bias, numbers)
        return out

    def spread(self, x: Tensor) -> None:
        """Launch `Ops.spread`."""
        spread(self.streams[: len(x)], x, self.gates[: len(x)])
