"""Hyper-connections between several residual streams on a CPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.connections import Connection
from shmllm.worker.cpu.products import Products
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.connections import FOLD, SPREAD
from shmllm_kernels.cpu.rows import PLACE


class ConnectionOps:
    """Records the operations of `models.ops.Ops` on streams that are connected to layers.

    Args:
        program: the program to record in.
        products: records matrix products there.
        num_tokens: the address of an int64, the number of tokens.
        streams: [max_tokens, streams * hidden], the streams of a token side by side.
        gates: [max_tokens, gates], those of a connection.
        folded: [max_tokens, hidden], the buffer of sums of streams.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        num_tokens: int,
        streams: Tensor,
        gates: Tensor,
        folded: Tensor,
    ) -> None:
        self._kernels = program
        self._products = products
        self._num_tokens = num_tokens
        self._streams = streams
        self._gates = gates
        self._folded = folded

    def repeat(self, residual: Tensor) -> None:
        """Record `Ops.repeat_stream`."""
        width = residual.shape[1]
        for stream in self._streams.split(width, 1):
            places = residual.data_ptr(), stream.data_ptr(), width
            strides = 4 * stream.stride(0), 4 * residual.stride(0)
            self._kernels.record(PLACE, [self._num_tokens, *places, *strides], label="place")

    def fold(self, connection: Connection) -> Tensor:
        """Record `Ops.fold_streams`."""
        spec, scale, bias = connection.spec, connection.scale, connection.bias
        logits = self._gates[:, : len(bias)]
        self._products.record(
            self._num_tokens, self._streams, connection.logits, logits, is_exact=True
        )
        numbers = [word_of_float(each) for each in (spec.norm_eps, spec.magnitude, spec.eps)]
        weights = [len(bias), scale.data_ptr(), bias.data_ptr(), self._folded.data_ptr()]
        self._kernels.record(
            FOLD,
            [*self._operands(spec.num_streams), *weights, *numbers, spec.iterations],
            label="fold",
        )
        return self._folded

    def spread(self, x: Tensor, connection: Connection) -> None:
        """Record `Ops.spread`."""
        spec = connection.spec
        operands = [*self._operands(spec.num_streams), x.data_ptr(), int(spec.iterations > 0)]
        self._kernels.record(SPREAD, operands, label="spread")

    def _operands(self, num_streams: int) -> list[int]:
        """Return the operands that both kernels have."""
        streams = [self._streams.data_ptr(), num_streams, self._folded.shape[1]]
        return [self._num_tokens, *streams, self._gates.data_ptr(), 4 * self._gates.stride(0)]
