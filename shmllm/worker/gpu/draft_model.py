"""The steps of a model that drafts on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.entries import stored_kv
from shmllm.worker.arena import Arena
from shmllm.worker.batch import SAMPLED_FOR_ROW, InputBatch
from shmllm.worker.draft_model import DraftModel
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.capture import CaptureReport
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.draft_launches import DraftLaunches
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, DraftDispatcher, GraphDispatcher
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.program import GpuProgram
from shmllm.worker.gpu.step_messages import StepMessage
from shmllm.worker.loading import LoadedModel
from shmllm.worker.step_inputs import StepInputs

MOST_MISSED = 2
"""The most tokens of a request in a step of the draft model that has a graph."""


class GpuDraftSteps:
    """See `DraftSteps`.

    Args:
        program: the forward pass of the model.
        launches: sends the inputs and samples.
    """

    def __init__(self, program: GpuProgram, launches: DraftLaunches) -> None:
        self._program = program
        self._launches = launches
        self._num_sampled = 0

    def compute(self, inputs: StepInputs) -> None:
        self._run(inputs, is_repeat=False)

    def sample(self, inputs: StepInputs, are_drafted: bool) -> None:
        if are_drafted:
            inputs = replace(inputs, token_ids=SAMPLED_FOR_ROW - inputs.rows)
        before, self._num_sampled = self._num_sampled, len(inputs.rows)
        logits = self._run(inputs, is_repeat=are_drafted and before == self._num_sampled)
        self._launches.sample_step(logits, inputs)

    def finish(self) -> None:
        self._launches.finish()

    def _run(self, inputs: StepInputs, is_repeat: bool) -> Tensor:
        mode, descriptor = self._launches.send(inputs, is_repeat)
        _, logits = self._program.run(mode, descriptor, int(inputs.counts.max()))
        return logits


class DraftModelProgram:
    """See `DraftProgram`. In a group rank 0 alone has it.

    Args:
        program: the forward pass of the model.
        group, num_blocks, max_tokens: see `DraftModel`.
    """

    def __init__(self, program: GpuProgram, group: int, num_blocks: int, max_tokens: int) -> None:
        self._program = program
        self._sizes = group, num_blocks, max_tokens

    def capture(self) -> CaptureReport:
        return self._program.capture()

    def play(self, step: StepMessage) -> None:
        raise AssertionError("one process computes whole steps")

    def make_drafter(self, batch: InputBatch, launches: DraftLaunches) -> DraftModel:
        return DraftModel(GpuDraftSteps(self._program, launches), batch, *self._sizes)


@dataclass(frozen=True, slots=True)
class DraftModelResources:
    """See `DraftResources`.

    Attributes:
        loaded: the draft model.
        first: the index of its first layer in the groups of the cache.
        inputs: the inputs of a step, which the large model's steps use, too.
        step_buffers: the activations and logits of a step.
        dispatcher: chooses the graphs of its steps.
        device: the device.
    """

    loaded: LoadedModel
    first: int
    inputs: GpuInputs
    step_buffers: GpuBuffers
    dispatcher: DraftDispatcher
    device: Device

    @classmethod
    def allocate(
        cls,
        config: EngineConfig,
        draft: LoadedModel,
        model: ModelConfig,
        inputs: GpuInputs,
        device: Device,
    ) -> DraftModelResources:
        """Make the objects for the largest step.

        Where all drafts of a request were right, the draft model has not computed the last one
        yet, so a step that has a graph computes one or two tokens of each request.

        Args:
            config: the engine's configuration.
            draft: the draft model.
            model: the configuration of the large model.
            inputs: the inputs of its steps.
            device: the device.
        """
        requests = config.max_drafting
        further = min(requests, config.max_drafts)
        buffers = GpuBuffers(
            draft.config,
            draft.dtype,
            config.scheduler.max_num_batched_tokens,
            requests,
            requests + further,
            device,
            config.load.deterministic,
            MOST_MISSED,
            len(inputs.block_tables[0, 0]) * config.cache.block_size,
            config.cache.block_size,
        )
        dispatcher = DraftDispatcher(config, requests, further, MOST_MISSED)
        return cls(draft, len(stored_kv(model)), inputs, buffers, dispatcher, device)

    @property
    def buffers(self) -> Sequence[Arena]:
        return (self.step_buffers.arena,)

    @property
    def num_captured(self) -> int:
        return len(self.dispatcher.graphs.captures()) * self.loaded.config.num_layers

    def run_largest(self, cache: GpuKVCache) -> None:
        tokens, requests = len(self.step_buffers.hidden), self.step_buffers.max_requests
        requests = min(requests, tokens)
        further = min(self.dispatcher.most_further, tokens - requests)
        eager = GraphDispatcher(CudaGraphMode.NONE, None, requests, tokens)
        largest = BatchDescriptor(tokens, requests, False, further)
        self.inputs.idle(largest)
        self._make_program(cache, eager).run(CudaGraphMode.NONE, largest, tokens)

    def make_program(self, cache: GpuKVCache) -> DraftModelProgram:
        group, keys, _ = cache.of_draft(self.loaded.config, self.first).layers[0]
        sizes = group, len(keys), len(self.step_buffers.hidden)
        return DraftModelProgram(self._make_program(cache, self.dispatcher.graphs), *sizes)

    def _make_program(self, cache: GpuKVCache, dispatcher: GraphDispatcher) -> GpuProgram:
        model, view = self.loaded.model, cache.of_draft(self.loaded.config, self.first)
        assert isinstance(model, DecoderModel), "a draft model is one of ours"
        return GpuProgram(model, view, self.inputs, self.step_buffers, self.device, dispatcher)
