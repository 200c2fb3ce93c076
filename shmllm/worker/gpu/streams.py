"""The operations on several residual streams on a GPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.altup import AltUpLayer
from shmllm.models.connections import Connection
from shmllm.worker.gpu.altup import AltUpOps
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.connections import ConnectionOps
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm_kernels.gpu.altup import match_magnitude


class StreamLaunches:
    """Launches the operations of `models.stream_ops.StreamOps`. Who inherits them sets the sizes of
    a step, `_descriptor`.

    Args:
        buffers: the buffers for the results.
    """

    _descriptor: BatchDescriptor

    def __init__(self, buffers: GpuBuffers) -> None:
        self._buffers = buffers
        self._altup = AltUpOps(buffers.streams, buffers.predicted)

    @property
    def _connections(self) -> ConnectionOps:
        connections = self._buffers.connections
        assert connections is not None, "the model has connections"
        return connections

    def stream(self, index: int) -> Tensor:
        return self._buffers.streams[index, : self._descriptor.num_tokens]

    def match_magnitude(self, x: Tensor, like: Tensor, out: Tensor) -> None:
        match_magnitude(x, like, out)

    def predict_streams(self, routed: Tensor, altup: AltUpLayer) -> Tensor:
        return self._altup.predict(routed, altup)

    def correct_streams(self, residual: Tensor, routed: Tensor, altup: AltUpLayer) -> Tensor:
        return self._altup.correct(residual, routed, altup)

    def add_to_streams(self, x: Tensor) -> None:
        self._altup.add(x)

    def repeat_stream(self, residual: Tensor) -> None:
        self._connections.repeat(residual)

    def fold_streams(self, connection: Connection) -> Tensor:
        return self._connections.fold(self._descriptor.num_tokens, connection)

    def spread(self, x: Tensor, connection: Connection) -> None:
        self._connections.spread(x)
