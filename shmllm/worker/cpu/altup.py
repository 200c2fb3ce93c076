"""Several residual streams on a CPU: mixtures of streams, and sums."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.altup import AltUpLayer
from shmllm.worker.cpu.products import kind_of
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.altup import CORRECT, MATCH_MAGNITUDE, MOST_STREAMS, PREDICT
from shmllm_kernels.cpu.norms import ADD


class AltUpOps:
    """Records the operations of `models.ops.Ops` on streams in a kernel program.

    Args:
        program: the program to record in.
        num_tokens: the address of an int64, the number of tokens.
        streams: [streams, max_tokens, hidden], the buffer of the streams.
        predicted: [max_tokens, hidden], the buffer of what a layer reads.
    """

    def __init__(
        self, program: KernelProgram, num_tokens: int, streams: Tensor, predicted: Tensor
    ) -> None:
        assert len(streams) <= MOST_STREAMS, "kernels compute no more"
        self._kernels = program
        self._num_tokens = num_tokens
        self._streams = streams
        self._predicted = predicted

    def match_magnitude(self, x: Tensor, like: Tensor, out: Tensor) -> None:
        """Record `Ops.match_magnitude`."""
        addresses = [each.data_ptr() for each in (x, like, out)]
        operands = [self._num_tokens, *addresses, out.shape[1]]
        self._kernels.record(MATCH_MAGNITUDE, operands, label="match_magnitude")

    def predict(self, routed: Tensor, altup: AltUpLayer) -> Tensor:
        """Record `Ops.predict_streams`."""
        operands = [*self._operands(routed, altup.prediction, altup), self._predicted.data_ptr()]
        kernel = PREDICT[kind_of(altup.prediction)]
        self._kernels.record(kernel, operands, label="predict_streams")
        return self._predicted

    def correct(self, residual: Tensor, routed: Tensor, altup: AltUpLayer) -> Tensor:
        """Record `Ops.correct_streams`."""
        scale = 0 if altup.scale is None else altup.scale.data_ptr()
        operands = [*self._operands(routed, altup.correction, altup), residual.data_ptr(), scale]
        kernel = CORRECT[kind_of(altup.correction)]
        self._kernels.record(kernel, operands, label="correct_streams")
        return residual

    def add(self, x: Tensor) -> None:
        """Record `Ops.add_to_streams`."""
        for stream in self._streams[1:]:
            addresses = [x.data_ptr(), stream.data_ptr()]
            width = x.shape[1]
            operands = [self._num_tokens, *addresses, width, word_of_float(1.0), 4 * width]
            self._kernels.record(ADD, operands, label="add_to_streams")

    def _operands(self, routed: Tensor, weight: Tensor, altup: AltUpLayer) -> list[int]:
        """Return the operands that both mixtures have."""
        count, _, width = self._streams.shape
        places = [self._streams.data_ptr(), 4 * self._streams.stride(0), count, width]
        factor = word_of_float(altup.router_scale)
        numbers = [routed.data_ptr(), factor, weight.data_ptr(), *places, altup.spec.active]
        return [self._num_tokens, *numbers]
