"""A model's forward pass on a GPU: launched, or replayed from graphs that were captured.

Owns the captured graphs, by the sizes that the dispatcher names. Must not know requests, nor when
a step is run with which mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shmllm.config.graphs import CudaGraphMode
from shmllm.errors import EngineStartError
from shmllm.models.decoder import DecoderModel
from shmllm.models.quantized import Int8Matrix
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, GraphDispatcher
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.ops import GpuOps, call_now, multiply
from shmllm.worker.gpu.piecewise_graph import PiecewiseGraph
from shmllm_kernels.gpu.attention import MAX_HEAD_DIM

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing took.

    Attributes:
        seconds: warming up included.
        num_bytes: of device memory that graphs hold.
        num_graphs: pieces are counted one by one.
    """

    seconds: float
    num_bytes: int
    num_graphs: int

    def __str__(self) -> str:
        mib = self.num_bytes / 2**20
        graphs = "graph" if self.num_graphs == 1 else "graphs"
        return f"{self.num_graphs:,} {graphs}, {self.seconds:.1f} s, {mib:,.0f} MiB"


def check_model(model: DecoderModel) -> None:
    """Raise EngineStartError if there are no kernels for a model, whose weights need not be set."""
    if isinstance(model.embedding.head.weight, Int8Matrix):
        raise EngineStartError(
            "quantization='int8' is for the CPU: leave it out, or start with device='cpu'"
        )
    if model.config.head_dim > MAX_HEAD_DIM:
        raise EngineStartError(
            f"heads of {model.config.head_dim} elements are too large for the GPU's attention, "
            f"which takes {MAX_HEAD_DIM}: start with device='cpu'"
        )


class GpuProgram:
    """
    Args:
        model: with its weights at the addresses where they stay.
        cache: for its keys and values.
        inputs: of each step.
        buffers: what it computes; ``hidden`` may be filled with embeddings beforehand.
        device: that computes.
        dispatcher: says what to capture.
        deterministic: see `GpuOps`.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: GpuKVCache,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: Device,
        dispatcher: GraphDispatcher,
        deterministic: bool = False,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._buffers = buffers
        self._device = device
        self._dispatcher = dispatcher
        self._ops = GpuOps(model.config, cache, inputs, buffers, device.torch_device, deterministic)
        self._full: dict[BatchDescriptor, PiecewiseGraph] = {}
        self._piecewise: dict[int, PiecewiseGraph] = {}

    def warm_up(self) -> None:
        """Run once whatever may be launched or captured, so that its code is compiled and loaded:
        a capture cannot do that, and a request should not wait for it."""
        max_tokens = len(self._buffers.hidden)
        most_decodes = min(len(self._buffers.logits), max_tokens)
        by_splits = {self._buffers.num_splits(n): n for n in range(most_decodes, 0, -1)}
        shapes = [BatchDescriptor(n, n, True) for n in by_splits.values()]
        shapes.append(BatchDescriptor(min(2, max_tokens), 1, False))
        shapes += [descriptor for _, descriptor in self._dispatcher.captures()]
        for descriptor in shapes:
            self._inputs.idle(descriptor)
            self.run(CudaGraphMode.NONE, descriptor, descriptor.num_tokens)
        self._device.synchronize()

    def capture(self, on_progress: Progress | None = None) -> CaptureReport:
        """Warm up, and capture what the dispatcher says.

        Args:
            on_progress: called with (captured, of how many).

        Raises:
            EngineStartError: something cannot be captured, or there is not enough memory.
        """
        began = time.monotonic()
        captures = self._dispatcher.captures()
        num_graphs = 0

        def tell(done: int) -> None:
            if on_progress is not None and captures:
                on_progress(done, len(captures))

        with self._device.capturing():
            tell(0)
            self.warm_up()  # on the stream that captures, which has workspaces of its own
            free_bytes = self._device.free_bytes()
            for done, (mode, descriptor) in enumerate(captures, 1):
                num_graphs += self._try_record(mode, descriptor).num_graphs
                tell(done)
        num_bytes = max(free_bytes - self._device.free_bytes(), 0)
        return CaptureReport(time.monotonic() - began, num_bytes, num_graphs)

    def run(
        self, mode: CudaGraphMode, descriptor: BatchDescriptor, max_query_len: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the step that is in the inputs, padded to the descriptor's sizes.

        Args:
            mode: NONE, PIECEWISE or FULL, as the dispatcher says.
            descriptor: likewise. A captured one may also be run with NONE.
            max_query_len: tokens of a request of the step.

        Returns:
            The hidden states after the final norm, [tokens, hidden], and logits, [requests,
            vocab], of those tokens that get a successor, both padded and in the model's dtype.
            Without such a token logits may be missing. The next step overwrites both.
        """
        if mode is CudaGraphMode.FULL:
            self._full[descriptor].replay()
            hidden = self._buffers.normed[: descriptor.num_tokens]
            return hidden, self._buffers.logits[: descriptor.num_reqs]
        self._ops.begin(descriptor, max_query_len)
        if mode is CudaGraphMode.PIECEWISE:
            self._piecewise[descriptor.num_tokens].replay()
            hidden = self._buffers.normed[: descriptor.num_tokens]
        else:
            hidden = self._model.forward(self._ops)
        if not self._inputs.num_samples:
            return hidden, self._buffers.logits[:0]
        return hidden, self._compute_sampled(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of what `run` returned -> [rows, vocab] float32."""
        head = self._model.embedding.head
        logits = hidden.new_empty(len(hidden), head.weight.shape[0])
        multiply(logits, hidden, head)
        return logits.float()

    def _compute_sampled(self, hidden: Tensor) -> Tensor:
        rows = self._ops.gather_samples(hidden)
        logits = self._buffers.logits[: len(rows)]
        multiply(logits, rows, self._model.embedding.head)
        return logits

    def _try_record(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> PiecewiseGraph:
        try:
            return self._record(mode, descriptor)
        except (RuntimeError, MemoryError) as problem:
            raise EngineStartError(
                f"the {mode.name} graph of {descriptor.num_tokens} tokens cannot be captured: "
                f"{problem}; smaller cudagraph_capture_sizes need less memory, and "
                "enforce_eager=True none"
            ) from problem

    def _record(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> PiecewiseGraph:
        pieces = PiecewiseGraph(self._device)
        is_full = mode is CudaGraphMode.FULL
        launch = call_now if is_full else pieces.call
        self._inputs.idle(descriptor)
        self._ops.begin(descriptor, descriptor.num_tokens, launch)
        pieces.begin()
        hidden = self._model.forward(self._ops)
        if is_full:
            self._compute_sampled(hidden)
            self._full[descriptor] = pieces
        else:
            self._piecewise[descriptor.num_tokens] = pieces
        pieces.end()
        return pieces
