"""What a GPU engine needs of a model that drafts when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shmllm.worker.arena import Arena
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.capture import CaptureReport
from shmllm.worker.gpu.draft_launches import DraftLaunches
from shmllm.worker.gpu.graph_dispatcher import DraftDispatcher
from shmllm.worker.gpu.step_messages import StepMessage
from shmllm.worker.step_drafter import StepDrafter


class DraftProgram(Protocol):
    """Computes the steps of a model that drafts."""

    def capture(self) -> CaptureReport:
        """Warm up, and capture the graphs.

        Raises:
            EngineStartError: a graph cannot be captured, or there is not enough memory.
        """

    def play(self, step: StepMessage) -> None:
        """Compute this rank's part of a step of which rank 0 has told."""

    def make_drafter(self, batch: InputBatch, launches: DraftLaunches) -> StepDrafter:
        """Make the drafter.

        Args:
            batch: the batch of the large model.
            launches: sends the inputs and samples.
        """


class DraftResources(Protocol):
    """The objects that compute the steps of a model that drafts, all but the KV cache.

    Attributes:
        dispatcher: chooses the graphs of its steps.
    """

    @property
    def dispatcher(self) -> DraftDispatcher: ...

    @property
    def buffers(self) -> Sequence[Arena]:
        """The arenas of buffers that the large model's steps do not use."""

    @property
    def num_captured(self) -> int:
        """The number of layers in all graphs that will be captured."""

    def run_largest(self, cache: GpuKVCache) -> None:
        """Compute the largest step, with a KV cache of one block."""

    def make_program(self, cache: GpuKVCache) -> DraftProgram:
        """Make what computes the steps with the KV cache."""
