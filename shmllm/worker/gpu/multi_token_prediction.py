"""The layer of a checkpoint that predicts a further token, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode
from shmllm.models.decoder import DecoderModel
from shmllm.worker.arena import Arena
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import SAMPLED_FOR_ROW, InputBatch, StepInputs
from shmllm.worker.gpu.attention_launches import max_verified
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.capture import CaptureReport, capture_graphs
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.draft_launches import DraftLaunches
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, DraftDispatcher
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.logits_ops import GpuLogitsOps
from shmllm.worker.gpu.ops import GpuOps
from shmllm.worker.gpu.piecewise_graph import PiecewiseGraph
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.multi_token_prediction import MultiTokenPrediction


@dataclass(frozen=True, slots=True)
class FurtherResources:
    """See `DraftResources`. The layer has the buffers of the model's steps, and runs between them.

    Attributes:
        model: the model, with one of its further layers.
        inputs: the inputs of a step.
        step_buffers: the activations and logits of a step.
        dispatcher: chooses the graphs of the layer.
        kept: [rows, hidden], the hidden state that each row keeps.
        device: the device.
    """

    model: DecoderModel
    inputs: GpuInputs
    step_buffers: GpuBuffers
    dispatcher: DraftDispatcher
    kept: Tensor
    device: Device

    @classmethod
    def allocate(
        cls,
        config: EngineConfig,
        model: DecoderModel,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: Device,
    ) -> FurtherResources:
        """Make the objects for the largest step.

        Args:
            config: the engine's configuration.
            model: the model.
            inputs, buffers: those of its steps.
            device: the device.
        """
        rows = config.scheduler.max_num_seqs
        size = rows, model.config.hidden_size
        kept = torch.zeros(size, dtype=model.dtype, device=device.torch_device)
        most = max_verified(config.speculative.most_drafted)
        dispatcher = DraftDispatcher(config, rows, config.max_drafts, most)
        return cls(model, inputs, buffers, dispatcher, kept, device)

    @property
    def buffers(self) -> Sequence[Arena]:
        return ()

    @property
    def num_captured(self) -> int:
        return len(self.dispatcher.graphs.captures())

    def run_largest(self, cache: GpuKVCache) -> None:
        tokens = len(self.step_buffers.hidden)
        largest = BatchDescriptor(tokens, min(self.step_buffers.max_requests, tokens), False)
        FurtherLayerProgram(self, cache).run_idle(largest)

    def make_drafter(
        self, cache: GpuKVCache, batch: InputBatch, launches: DraftLaunches
    ) -> tuple[MultiTokenPrediction, CaptureReport]:
        program = FurtherLayerProgram(self, cache)
        captured = program.capture()
        steps = GpuFurtherSteps(self, program, launches)
        return MultiTokenPrediction(steps, batch), captured


class FurtherLayerProgram:
    """The forward pass of the layer, and its captured graphs. It reads the hidden states of tokens
    in ``buffers.normed``, where the model's steps leave theirs, and writes its results there.

    Args:
        resources: the objects that compute its steps.
        cache: the KV cache, which has keys and values of the layer, too.
    """

    def __init__(self, resources: FurtherResources, cache: GpuKVCache) -> None:
        self._model = resources.model
        self._inputs = resources.inputs
        self._buffers = resources.step_buffers
        self._device = resources.device
        self._dispatcher = resources.dispatcher.graphs
        where = resources.device.torch_device
        self._ops = GpuOps(self._model.config, cache, self._inputs, self._buffers, where)
        self._graphs: dict[BatchDescriptor, PiecewiseGraph] = {}

    def run(self, mode: CudaGraphMode, descriptor: BatchDescriptor, max_query_len: int) -> None:
        """Compute the step whose inputs `GpuInputs` has.

        Args:
            mode: NONE or FULL.
            descriptor: the padded sizes.
            max_query_len: the largest number of tokens of a request.
        """
        if mode is CudaGraphMode.FULL:
            self._graphs[descriptor].replay()
            return
        self._ops.begin(descriptor, max_query_len)
        self._forward(descriptor)

    def run_idle(self, descriptor: BatchDescriptor) -> None:
        """Launch a step of padding."""
        self._inputs.idle(descriptor)
        self.run(CudaGraphMode.NONE, descriptor, descriptor.num_tokens)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, [rows, vocab] in the model's dtype, of results, [rows, hidden]. The
        model's next step overwrites them."""
        logits = self._buffers.logits[: len(hidden)]
        return self._model.logits(GpuLogitsOps(logits, self._ops.products), hidden)

    def capture(self) -> CaptureReport:
        """Warm up, and capture the graphs.

        Raises:
            EngineStartError: a graph cannot be captured, or there is not enough memory.
        """
        captures = self._dispatcher.captures()
        owner = "the layer that drafts"
        return capture_graphs(self._device, captures, self._warm_up, self._capture, owner)

    def _warm_up(self) -> None:
        sizes = len(self._buffers.hidden), self._buffers.max_requests
        shapes = self._ops.variants(*sizes, self._model.has_packed)
        for descriptor in shapes + [each for _, each in self._dispatcher.captures()]:
            self.run_idle(descriptor)

    def _capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> PiecewiseGraph:
        assert mode is CudaGraphMode.FULL, "the layer has no calls between graphs"
        graph = PiecewiseGraph(self._device)
        self._inputs.idle(descriptor)
        self._ops.begin(descriptor, descriptor.num_tokens)
        graph.begin()
        self._forward(descriptor)
        graph.end()
        self._graphs[descriptor] = graph
        return graph

    def _forward(self, descriptor: BatchDescriptor) -> None:
        hidden = self._buffers.normed[: descriptor.num_tokens]
        after = self._model.further[0](self._ops, hidden, self._model.embedding)
        assert after.data_ptr() == hidden.data_ptr(), "the last norm writes there"


class GpuFurtherSteps:
    """See `FurtherSteps`.

    Args:
        resources: the objects that compute its steps.
        program: the forward pass of the layer.
        launches: sends the inputs and samples.
    """

    def __init__(
        self, resources: FurtherResources, program: FurtherLayerProgram, launches: DraftLaunches
    ) -> None:
        self._program = program
        self._launches = launches
        self._kept = resources.kept
        self._buffers = resources.step_buffers
        self._step = resources.inputs.step
        self._transfers = Transfers(resources.device)

    def follow(
        self, inputs: StepInputs, hidden: Tensor, rows: LongArray, chosen: LongArray
    ) -> None:
        assert hidden.data_ptr() == self._buffers.normed.data_ptr(), "where the layer reads them"
        mode, descriptor = self._launches.send(inputs, is_repeat=True)
        self._program.run(mode, descriptor, int(inputs.counts.max()))
        if not len(rows):
            return
        where, sources = self._transfers.send(rows, chosen)
        results = self._buffers.sampled[: len(rows)]
        torch.index_select(self._buffers.normed, 0, sources, out=results)
        self._kept.index_copy_(0, where, results)

    def advance(self, inputs: StepInputs) -> None:
        inputs = replace(inputs, token_ids=SAMPLED_FOR_ROW - inputs.rows)
        mode, descriptor = self._launches.send(inputs)
        rows = self._step.rows[: len(inputs.rows)]
        hidden = self._buffers.normed[: len(inputs.rows)]
        torch.index_select(self._kept, 0, rows, out=hidden)
        self._program.run(mode, descriptor, 1)
        self._kept.index_copy_(0, rows, hidden)

    def sample(self, rows: LongArray, positions: LongArray) -> None:
        where, *sent = self._transfers.send(rows, rows.astype("int32"), positions)
        hidden = self._buffers.sampled[: len(rows)]
        torch.index_select(self._kept, 0, where, out=hidden)
        logits = self._program.compute_logits(hidden)
        self._launches.sample(logits, rows, positions, *sent)

    def finish(self) -> None:
        self._launches.finish()
