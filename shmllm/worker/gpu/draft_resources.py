"""What a GPU engine needs of a model that drafts when it starts, and the graphs of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from shmllm.config.engine import EngineConfig
from shmllm.config.graphs import CudaGraphMode
from shmllm.worker.arena import Arena
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.capture import CaptureReport
from shmllm.worker.gpu.draft_launches import DraftLaunches
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, GraphDispatcher
from shmllm.worker.step_drafter import StepDrafter


class DraftResources(Protocol):
    """The objects that compute the steps of a model that drafts, all but the KV cache."""

    @property
    def buffers(self) -> Sequence[Arena]:
        """The arenas of buffers that the large model's steps do not use."""

    @property
    def num_captured(self) -> int:
        """The number of layers in all graphs that will be captured."""

    def run_largest(self, cache: GpuKVCache) -> None:
        """Compute the largest step, with a KV cache of one block."""

    def make_drafter(
        self, cache: GpuKVCache, batch: InputBatch, launches: DraftLaunches
    ) -> tuple[StepDrafter, CaptureReport]:
        """Make the drafter, and capture its graphs.

        Args:
            cache: the KV cache.
            batch: the batch of the large model.
            launches: sends the inputs and samples.

        Raises:
            EngineStartError: a graph cannot be captured, or there is not enough memory.
        """


class DraftDispatcher:
    """Chooses the graphs of steps whose graphs are those of decodes: they replay graphs if decodes
    of the large model do.

    Args:
        config: the engine's configuration.
        max_requests: the largest number of requests in a step.
        most_further: the most tokens that a step with a graph may have besides one for each
            request.

    Attributes:
        most_further: as given.
        graphs: the choice.
    """

    def __init__(self, config: EngineConfig, max_requests: int, most_further: int) -> None:
        self.most_further = most_further
        graphs, mode = config.graphs, CudaGraphMode.NONE
        if graphs.effective_mode.decode_mode is CudaGraphMode.FULL:
            mode = CudaGraphMode.FULL_DECODE_ONLY
        self.graphs = GraphDispatcher(
            mode,
            graphs.capture_sizes,
            max_requests,
            config.scheduler.max_num_batched_tokens,
            graphs.max_capture_size,
            max_drafts=most_further,
        )

    def dispatch(self, num_tokens: int, num_requests: int) -> tuple[CudaGraphMode, BatchDescriptor]:
        """Choose the mode and the padded sizes of a step; see `GraphDispatcher.dispatch`. Logits of
        further tokens, which nobody needs, are computed by graphs only."""
        further = num_tokens - num_requests
        num_drafts = further if further <= self.most_further else 0
        mode, descriptor = self.graphs.dispatch(num_tokens, num_requests, not further, num_drafts)
        if mode is CudaGraphMode.NONE:
            descriptor = replace(descriptor, num_drafts=0)
        return mode, descriptor
