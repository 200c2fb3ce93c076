"""The layer of a checkpoint that predicts a further token, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
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
from shmllm.worker.gpu.group import NoMeetings
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.logits_ops import GpuLogitsOps
from shmllm.worker.gpu.ops import GpuOps
from shmllm.worker.gpu.piecewise_graph import PiecewiseGraph
from shmllm.worker.gpu.step_messages import Act, StepMessage, logits_message
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
        meetings: the meetings of the ranks of a group.
    """

    model: DecoderModel
    inputs: GpuInputs
    step_buffers: GpuBuffers
    dispatcher: DraftDispatcher
    kept: Tensor
    device: Device
    meetings: NoMeetings

    @classmethod
    def allocate(
        cls,
        config: EngineConfig,
        model: DecoderModel,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: Device,
        meetings: NoMeetings,
    ) -> FurtherResources:
        """Make the objects for the largest step.

        Args:
            config: the engine's configuration.
            model: the model.
            inputs, buffers, meetings: those of its steps.
            device: the device.
        """
        rows = config.scheduler.max_num_seqs
        size = rows, model.config.hidden_size
        kept = torch.zeros(size, dtype=model.dtype, device=device.torch_device)
        most = max_verified(config.speculative.most_drafted)
        dispatcher = DraftDispatcher(config, rows, config.max_drafts, most)
        return cls(model, inputs, buffers, dispatcher, kept, device, meetings)

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

    def make_program(self, cache: GpuKVCache) -> FurtherLayerProgram:
        return FurtherLayerProgram(self, cache)


class FurtherLayerProgram:
    """The forward pass of the layer, and its captured graphs; see `DraftProgram`. It reads the
    hidden states of tokens in ``buffers.normed``, where the model's steps leave theirs, and writes
    its results there. All ranks of a group keep the same hidden states.

    Args:
        resources: the objects that compute its steps.
        cache: the KV cache, which has keys and values of the layer, too.

    Attributes:
        hidden: [max_tokens, hidden], ``buffers.normed``.
    """

    def __init__(self, resources: FurtherResources, cache: GpuKVCache) -> None:
        self._model = resources.model
        self._inputs = resources.inputs
        self._buffers = resources.step_buffers
        self.hidden = self._buffers.normed
        self._device = resources.device
        self._dispatcher = resources.dispatcher.graphs
        self._kept = resources.kept
        self._meetings = meetings = resources.meetings
        self._transfers = Transfers(resources.device)
        common = self._model.config, cache, self._inputs, self._buffers
        self._ops = GpuOps(*common, resources.device.torch_device, meetings=meetings)
        self._graphs: dict[BatchDescriptor, PiecewiseGraph] = {}

    def run(self, mode: CudaGraphMode, descriptor: BatchDescriptor, max_query_len: int) -> None:
        """Compute the step whose inputs `GpuInputs` has.

        Args:
            mode: NONE or FULL.
            descriptor: the padded sizes.
            max_query_len: the largest number of tokens of a request.
        """
        self._meetings.begin(self._inputs.last_tokens)
        if mode is CudaGraphMode.FULL:
            self._graphs[descriptor].replay()
            return
        self._ops.begin(descriptor, max_query_len)
        self._forward(descriptor)

    def run_idle(self, descriptor: BatchDescriptor) -> None:
        """Launch a step of padding."""
        self._inputs.idle(descriptor)
        self.run(CudaGraphMode.NONE, descriptor, descriptor.num_tokens)

    def follow(
        self,
        mode: CudaGraphMode,
        descriptor: BatchDescriptor,
        max_query_len: int,
        kept: LongArray,
    ) -> None:
        """Run the layer for the tokens of the model's last step.

        Args:
            mode, descriptor, max_query_len: see `run`.
            kept: (2, n) int64, the rows that keep a result, and the tokens that have it.
        """
        self.run(mode, descriptor, max_query_len)
        if not kept.shape[1]:
            return
        rows, chosen = self._transfers.send(*kept)
        results = self._buffers.sampled[: len(rows)]
        torch.index_select(self._buffers.normed, 0, chosen, out=results)
        self._kept.index_copy_(0, rows, results)

    def advance(self, mode: CudaGraphMode, descriptor: BatchDescriptor, num_rows: int) -> None:
        """Run the layer for a token of each row of the step, from the hidden state that it keeps,
        which becomes the result."""
        rows, hidden = self._inputs.step.rows[:num_rows], self._buffers.normed[:num_rows]
        torch.index_select(self._kept, 0, rows, out=hidden)
        self.run(mode, descriptor, 1)
        self._kept.index_copy_(0, rows, hidden)

    def logits_of(self, rows: Tensor) -> Tensor:
        """Compute the logits, [n, vocab] in the model's dtype, of the hidden states that rows, (n,)
        int64 on the device, keep. The model's next step overwrites them. Rank 0 alone has them."""
        self._meetings.begin(self._inputs.last_tokens)
        hidden = self._buffers.sampled[: len(rows)]
        torch.index_select(self._kept, 0, rows, out=hidden)
        logits = self._buffers.logits[: len(rows)]
        return self._model.logits(GpuLogitsOps(logits, self._ops.products, self._meetings), hidden)

    def play(self, step: StepMessage) -> None:
        assert step.kept is not None, "messages have it"
        if step.act is Act.LOGITS:
            self.logits_of(*self._transfers.send(step.kept[0]))
            return
        self._inputs.launch(step.packed, step.descriptor, step.is_repeat)
        if step.act is Act.FOLLOW:
            self.follow(step.mode, step.descriptor, step.max_query_len, step.kept)
        else:
            self.advance(step.mode, step.descriptor, step.packed.sizes.num_requests)

    def make_drafter(self, batch: InputBatch, launches: DraftLaunches) -> MultiTokenPrediction:
        return MultiTokenPrediction(GpuFurtherSteps(self, launches, self._device), batch)

    def capture(self) -> CaptureReport:
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
        program: the forward pass of the layer.
        launches: sends the inputs and samples.
        device: the device.
    """

    def __init__(
        self, program: FurtherLayerProgram, launches: DraftLaunches, device: Device
    ) -> None:
        self._program = program
        self._launches = launches
        self._transfers = Transfers(device)

    def follow(
        self, inputs: StepInputs, hidden: Tensor, rows: LongArray, chosen: LongArray
    ) -> None:
        assert hidden.data_ptr() == self._program.hidden.data_ptr(), "where the layer reads them"
        kept = np.stack([rows, chosen])
        sizes = self._launches.send(inputs, is_repeat=True, act=Act.FOLLOW, kept=kept)
        self._program.follow(*sizes, int(inputs.counts.max()), kept)

    def advance(self, inputs: StepInputs) -> None:
        inputs = replace(inputs, token_ids=SAMPLED_FOR_ROW - inputs.rows)
        sizes = self._launches.send(inputs, act=Act.ADVANCE)
        self._program.advance(*sizes, len(inputs.rows))

    def sample(self, rows: LongArray, positions: LongArray) -> None:
        if self._launches.tell is not None:
            self._launches.tell(logits_message(rows))
        where, *sent = self._transfers.send(rows, rows.astype("int32"), positions)
        logits = self._program.logits_of(where)
        self._launches.sample(logits, rows, positions, *sent)

    def finish(self) -> None:
        self._launches.finish()
