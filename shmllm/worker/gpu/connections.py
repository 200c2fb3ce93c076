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
        gates: [max_tokens, gates] float32, those of a connection.
        parts: [max_tokens, parts, gates + 1] float32, scratch memory of its product.
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
        rows = len(folded)
        joined, num_gates = config.connected_width, config.connections.num_gates
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
        of_added = 0.0 if spec.iterations else spec.eps
        numbers = GateNumbers(spec.norm_eps, spec.magnitude, spec.eps, of_added)
        weights = matrix, connection.scale, connection.bias
        fold(out, gates, streams, parts, *weights, numbers, spec.iterations)
        return out

    def spread(self, x: Tensor) -> None:
        """Launch `Ops.spread`."""
        spread(self.streams[: len(x)], x, self.gates[: len(x)])
