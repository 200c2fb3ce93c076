"""Several residual streams on a GPU: mixtures of streams, and sums."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.altup import AltUpLayer
from shmllm_kernels.gpu.altup import correct, predict


class AltUpOps:
    """Launches the operations of `models.ops.Ops` on streams.

    Args:
        streams: [streams, max_tokens, hidden], the buffer of the streams.
        predicted: [max_tokens, hidden], the buffer of what a layer reads.
    """

    def __init__(self, streams: Tensor, predicted: Tensor) -> None:
        self._streams = streams
        self._predicted = predicted

    def predict(self, routed: Tensor, altup: AltUpLayer) -> Tensor:
        """Launch `Ops.predict_streams`."""
        streams, out = self._streams[:, : len(routed)], self._predicted[: len(routed)]
        predict(streams, routed, altup.prediction, altup.router_scale, altup.spec.active, out)
        return out

    def correct(self, residual: Tensor, routed: Tensor, altup: AltUpLayer) -> Tensor:
        """Launch `Ops.correct_streams`."""
        streams = self._streams[:, : len(routed)]
        numbers = altup.router_scale, altup.spec.active
        correct(streams, residual, routed, altup.correction, *numbers, altup.scale)
        return residual

    def add(self, x: Tensor) -> None:
        """Launch `Ops.add_to_streams`."""
        self._streams[1:, : len(x)].add_(x)
