"""What predicts tokens from hidden states, on a GPU: the layer of a checkpoint that does so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.worker.arena import Arena
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import SAMPLED_FOR_ROW, InputBatch
from shmllm.worker.block_drafter import BlockDrafter
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
from shmllm.worker.step_drafter import StepDrafter
from shmllm.worker.step_inputs import StepInputs


class StatesForward(Protocol):
    """What computes further states from hidden states, once there are inputs.

    Attributes:
        config: the configuration of the model that it belongs to.
        hidden: [max_tokens, hidden], where it reads hidden states, and leaves its results.
        has_packed: whether a matrix is packed.
        mask_token: see `MultiTokenPrediction`.
        runs_behind: whether the forward pass runs behind each step of the large model.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def hidden(self) -> Tensor: ...

    @property
    def has_packed(self) -> bool: ...

    @property
    def mask_token(self) -> int | None: ...

    @property
    def runs_behind(self) -> bool: ...

    def take(self, num_tokens: int, ops: GpuOps) -> None:
        """Bring the states of the large model's last step, of so many tokens, to `hidden`, or store
        the keys and values that are made of them if nothing runs behind that step."""

    def take_mask(self, num_tokens: int, ops: GpuOps) -> None:
        """Bring what stands for the states of tokens that are not known to `hidden`, so often."""

    def launch(self, ops: GpuOps, num_tokens: int) -> None:
        """Launch the forward pass of the step that the operations have begun."""

    def logits(self, states: Tensor, logits: Tensor, ops: GpuOps) -> Tensor:
        """Compute the logits, [n, vocab], of results, [n, hidden], which may be overwritten.

        Args:
            states: the results.
            logits: [n, columns of `GpuBuffers.logits`], memory that may be used.
            ops: the operations.
        """

    def warm_up(self, ops: GpuOps, states: Tensor, logits: Tensor) -> None:
        """Launch what no step of the large model has launched, with memory for the results and the
        logits of as many rows as can be."""


class LayerForward:
    """See `StatesForward`: the layer behind a model's last one, which has the buffers of the
    model's steps. These leave their hidden states in ``buffers.normed``.

    Args:
        model: the model, with one of its further layers.
        buffers: the activations and logits of its steps.
        meetings: the meetings of the ranks of a group.
    """

    mask_token = None
    runs_behind = True

    def __init__(self, model: DecoderModel, buffers: GpuBuffers, meetings: NoMeetings) -> None:
        self._model = model
        self._meetings = meetings
        self.config = model.config
        self.hidden = buffers.normed
        self.has_packed = model.has_packed

    def take(self, num_tokens: int, ops: GpuOps) -> None:
        """Do nothing: they are there."""

    def take_mask(self, num_tokens: int, ops: GpuOps) -> None:
        raise AssertionError("each draft reads the one before")

    def launch(self, ops: GpuOps, num_tokens: int) -> None:
        hidden = self.hidden[:num_tokens]
        after = self._model.further[0](ops, hidden, self._model.embedding)
        assert after.data_ptr() == hidden.data_ptr(), "the last norm writes there"

    def logits(self, states: Tensor, logits: Tensor, ops: GpuOps) -> Tensor:
        return self._model.logits(GpuLogitsOps(logits, ops.products, self._meetings), states)

    def warm_up(self, ops: GpuOps, states: Tensor, logits: Tensor) -> None:
        """Do nothing: the model's steps have the same product."""


@dataclass(frozen=True, slots=True)
class FurtherResources:
    """See `DraftResources`. The steps run between those of the model.

    Attributes:
        forward: what computes them.
        inputs: the inputs of a step.
        step_buffers: the activations and logits of a step.
        dispatcher: chooses the graphs of the steps.
        kept: [rows, hidden], the hidden state that each row keeps.
        device: the device.
        meetings: the meetings of the ranks of a group.
        first: the index of the first of the layers in the groups of the cache; None: they are
            layers of the model.
        buffers: see `DraftResources`.
    """

    forward: StatesForward
    inputs: GpuInputs
    step_buffers: GpuBuffers
    dispatcher: DraftDispatcher
    kept: Tensor
    device: Device
    meetings: NoMeetings
    first: int | None = None
    buffers: Sequence[Arena] = ()

    @classmethod
    def of_layer(
        cls,
        config: EngineConfig,
        model: DecoderModel,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: Device,
        meetings: NoMeetings,
    ) -> FurtherResources:
        """Make the objects of the layer behind a model's last one for the largest step.

        Args:
            config: the engine's configuration.
            model: the model.
            inputs, buffers, meetings: those of its steps.
            device: the device.
        """
        most = config.speculative.most_drafted
        kept, dispatcher = kept_states(config, model, device), further_dispatcher(config, most)
        forward = LayerForward(model, buffers, meetings)
        return cls(forward, inputs, buffers, dispatcher, kept, device, meetings)

    @property
    def num_captured(self) -> int:
        return len(self.dispatcher.graphs.captures())

    def run_largest(self, cache: GpuKVCache) -> None:
        tokens = len(self.step_buffers.hidden)
        largest = BatchDescriptor(tokens, min(self.step_buffers.max_requests, tokens), False)
        program = FurtherProgram(self, cache)
        program.run_idle(largest)
        program.warm_up_logits()

    def make_program(self, cache: GpuKVCache) -> FurtherProgram:
        return FurtherProgram(self, cache)


def kept_states(config: EngineConfig, model: DecoderModel, device: Device) -> Tensor:
    """Return the memory of the hidden states that rows keep, [rows, hidden]."""
    size = config.scheduler.max_num_seqs, model.config.hidden_size
    return torch.zeros(size, dtype=model.dtype, device=device.torch_device)


def further_dispatcher(config: EngineConfig, most_drafted: int) -> DraftDispatcher:
    """Return what chooses graphs of steps beside those of the large model, of the same sizes.

    Args:
        config: the engine's configuration.
        most_drafted: the most drafted tokens of a request that a kernel for few tokens computes.
    """
    most = max_verified(most_drafted)
    return DraftDispatcher(config, config.scheduler.max_num_seqs, config.max_drafts, most)


class FurtherProgram:
    """The forward pass of what predicts tokens from hidden states, and its captured graphs; see
    `DraftProgram`. All ranks of a group keep the same hidden states.

    Args:
        resources: the objects that compute its steps.
        cache: the KV cache, which has its keys and values, too.
    """

    def __init__(self, resources: FurtherResources, cache: GpuKVCache) -> None:
        self._steps = resources.forward
        self._inputs = resources.inputs
        self._buffers = resources.step_buffers
        self._device = resources.device
        self._dispatcher = resources.dispatcher.graphs
        self._kept = resources.kept
        self._meetings = meetings = resources.meetings
        self._transfers = Transfers(resources.device)
        config, first = self._steps.config, resources.first
        view = cache if first is None else cache.of_draft(config, first)
        common = config, view, self._inputs, self._buffers
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
        self._steps.launch(self._ops, descriptor.num_tokens)

    def run_idle(self, descriptor: BatchDescriptor) -> None:
        """Launch a step of padding."""
        self._inputs.idle(descriptor)
        self.run(CudaGraphMode.NONE, descriptor, descriptor.num_tokens)
        if not self._steps.runs_behind:
            self._steps.take(descriptor.num_tokens, self._ops)

    def follow(
        self,
        mode: CudaGraphMode,
        descriptor: BatchDescriptor,
        max_query_len: int,
        kept: LongArray,
    ) -> None:
        """Run for the tokens of the model's last step.

        Args:
            mode, descriptor, max_query_len: see `run`.
            kept: (2, n) int64, the rows that keep a result, and the tokens that have it.
        """
        if not self._steps.runs_behind:
            self._ops.begin(descriptor, max_query_len)
        self._steps.take(descriptor.num_tokens, self._ops)
        if self._steps.runs_behind:
            self.run(mode, descriptor, max_query_len)
            self.keep(kept)

    def expand(self, mode: CudaGraphMode, descriptor: BatchDescriptor, max_query_len: int) -> None:
        """Run for tokens that are not known. Arguments: see `run`."""
        self._steps.take_mask(descriptor.num_tokens, self._ops)
        self.run(mode, descriptor, max_query_len)

    def keep(self, kept: LongArray) -> None:
        """Keep results of the last call of `run`; see `follow`."""
        if not kept.shape[1]:
            return
        rows, chosen = self._transfers.send(*kept)
        results = self._buffers.sampled[: len(rows)]
        torch.index_select(self._steps.hidden, 0, chosen, out=results)
        self._kept.index_copy_(0, rows, results)

    def advance(self, mode: CudaGraphMode, descriptor: BatchDescriptor, num_rows: int) -> None:
        """Run for a token of each row of the step, from the hidden state that it keeps, which
        becomes the result."""
        rows, hidden = self._inputs.step.rows[:num_rows], self._steps.hidden[:num_rows]
        torch.index_select(self._kept, 0, rows, out=hidden)
        self.run(mode, descriptor, 1)
        self._kept.index_copy_(0, rows, hidden)

    def logits_of(self, rows: Tensor) -> Tensor:
        """Compute the logits, [n, vocab] in the model's dtype, of the hidden states that rows, (n,)
        int64 on the device, keep. The model's next step overwrites them. Rank 0 alone has them."""
        self._meetings.begin(self._inputs.last_tokens)
        hidden = self._buffers.sampled[: len(rows)]
        torch.index_select(self._kept, 0, rows, out=hidden)
        return self._steps.logits(hidden, self._buffers.logits[: len(rows)], self._ops)

    def warm_up_logits(self) -> None:
        """Launch what computes logits, if steps of the large model do not."""
        logits = self._buffers.logits
        self._steps.warm_up(self._ops, self._buffers.sampled[: len(logits)], logits)

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

    def make_drafter(self, batch: InputBatch, launches: DraftLaunches) -> StepDrafter:
        steps, mask = GpuFurtherSteps(self, launches, self._device), self._steps.mask_token
        if self._steps.runs_behind:
            return MultiTokenPrediction(steps, batch, mask)
        assert mask is not None, "its configuration has it"
        return BlockDrafter(steps, batch, mask)

    def capture(self) -> CaptureReport:
        captures = self._dispatcher.captures()
        owner = "what drafts"
        return capture_graphs(self._device, captures, self._warm_up, self._capture, owner)

    def _warm_up(self) -> None:
        sizes = len(self._buffers.hidden), self._buffers.max_requests
        shapes = self._ops.variants(*sizes, self._steps.has_packed)
        for descriptor in shapes + [each for _, each in self._dispatcher.captures()]:
            self.run_idle(descriptor)
        self.warm_up_logits()

    def _capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> PiecewiseGraph:
        assert mode is CudaGraphMode.FULL, "there are no calls between graphs"
        graph = PiecewiseGraph(self._device)
        self._inputs.idle(descriptor)
        self._ops.begin(descriptor, descriptor.num_tokens)
        graph.begin()
        self._steps.launch(self._ops, descriptor.num_tokens)
        graph.end()
        self._graphs[descriptor] = graph
        return graph


class GpuFurtherSteps:
    """See `FurtherSteps`.

    Args:
        program: the forward pass.
        launches: sends the inputs and samples.
        device: the device.
    """

    def __init__(self, program: FurtherProgram, launches: DraftLaunches, device: Device) -> None:
        self._program = program
        self._launches = launches
        self._transfers = Transfers(device)

    def follow(
        self, inputs: StepInputs, hidden: Tensor, rows: LongArray, chosen: LongArray
    ) -> None:
        kept = np.stack([rows, chosen])
        sizes = self._launches.send(inputs, is_repeat=True, act=Act.FOLLOW, kept=kept)
        self._program.follow(*sizes, int(inputs.counts.max()), kept)

    def advance(self, inputs: StepInputs) -> None:
        inputs = replace(inputs, token_ids=SAMPLED_FOR_ROW - inputs.rows)
        sizes = self._launches.send(inputs, act=Act.ADVANCE)
        self._program.advance(*sizes, len(inputs.rows))

    def expand(self, inputs: StepInputs) -> None:
        self._program.expand(*self._launches.send(inputs), int(inputs.counts.max()))

    def keep(self, rows: LongArray, chosen: LongArray) -> None:
        self._program.keep(np.stack([rows, chosen]))

    def sample(self, rows: LongArray, positions: LongArray) -> None:
        if self._launches.tell is not None:
            self._launches.tell(logits_message(rows))
        where, *sent = self._transfers.send(rows, rows.astype("int32"), positions)
        logits = self._program.logits_of(where)
        self._launches.sample(logits, rows, positions, *sent)

    def finish(self) -> None:
        self._launches.finish()
