"""Launches of a model that drafts, and the tokens that it samples on their way to the host.

This module owns the order of the inputs of several steps between two steps of the large model, and
the drafted tokens that only the device has. It must not know what a step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from shmllm.config.graphs import CudaGraphMode
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor, DraftDispatcher
from shmllm.worker.gpu.inputs import MAX_STEPS_IN_FLIGHT, NO_CHANGES, GpuInputs
from shmllm.worker.gpu.sampler import GpuSampler
from shmllm.worker.gpu.step_messages import Act, StepMessage
from shmllm.worker.gpu.transfers import PendingArrays
from shmllm.worker.step_inputs import StepInputs


class DraftLaunches:
    """Sends inputs, and samples, for steps of a model that drafts.

    The steps use the inputs of the large model's steps, which do not overlap then, and its sampler:
    a drafted token is the last one of its row on the device until the large model's step samples,
    so a further step can embed it before the host has it.

    Args:
        batch: the batch, which gets the drafted tokens.
        inputs: the inputs of a step.
        sampler: samples with the parameters of the batch.
        dispatcher: chooses the graphs of the steps.
        device: the device.
        tell: lets the other ranks of a group compute their parts of a step; None: this process
            computes whole steps.
    """

    def __init__(
        self,
        batch: InputBatch,
        inputs: GpuInputs,
        sampler: GpuSampler,
        dispatcher: DraftDispatcher,
        device: Device,
        tell: Callable[[StepMessage], None] | None = None,
    ) -> None:
        self.tell = tell
        self._batch = batch
        self._inputs = inputs
        self._sampler = sampler
        self._dispatcher = dispatcher
        self._unpacked = deque(device.event() for _ in range(MAX_STEPS_IN_FLIGHT))
        self._pending: list[tuple[LongArray, LongArray, PendingArrays]] = []

    def send(
        self,
        inputs: StepInputs,
        is_repeat: bool = False,
        act: Act = Act.MODEL,
        kept: LongArray | None = None,
    ) -> tuple[CudaGraphMode, BatchDescriptor]:
        """Choose the mode and the padded sizes of a step, which are returned, and send its inputs.

        As `GpuInputs.send`, for any number of steps: waits until the device has unpacked the inputs
        of the step before the last one.

        Args:
            inputs: the inputs.
            is_repeat: whether the step's requests are those of the step before, in their order.
            act, kept: see `StepMessage`.
        """
        longest = int(inputs.counts.max())
        mode, descriptor = self._dispatcher.dispatch(
            len(inputs.token_ids), len(inputs.rows), longest
        )
        self._unpacked.rotate()
        self._unpacked[0].wait()
        packed = self._inputs.pack(inputs)
        if self.tell is not None:
            sizes = mode, descriptor, longest
            self.tell(StepMessage(*sizes, packed, is_repeat, NO_CHANGES, [], act=act, kept=kept))
        self._inputs.launch(packed, descriptor, is_repeat)
        self._unpacked[0].record()
        return mode, descriptor

    def sample_step(self, logits: Tensor, inputs: StepInputs) -> None:
        """Sample behind the step that was sent last.

        Args:
            logits: (N or more, V), of the dtype that steps have.
            inputs: the inputs of the step, with N samples.
        """
        count = len(inputs.sample_rows)
        rows, positions = self._inputs.sample_rows[:count], self._inputs.sample_positions[:count]
        host = inputs.sample_rows, inputs.sample_positions
        self.sample(logits[:count], *host, rows, positions)

    def sample(
        self,
        logits: Tensor,
        rows: LongArray,
        positions: LongArray,
        device_rows: Tensor,
        device_positions: Tensor,
    ) -> None:
        """Sample tokens, and start to copy them to the host.

        Args:
            logits: (N, V), of the dtype that steps have.
            rows: (N,) int64, the row of each token.
            positions: (N,) int64, the positions that the tokens will have.
            device_rows: (N,) int32 on the device, the same rows.
            device_positions: (N,) int64 on the device, the same positions.
        """
        tokens = self._sampler.choose(logits, rows, device_rows, device_positions)
        self._pending.append((rows, positions, self._sampler.transfers.fetch(tokens)))

    def finish(self) -> None:
        """Wait for the sampled tokens, and put them into the batch."""
        for rows, positions, tokens in self._pending:
            self._batch.token_ids[rows, positions] = tokens.arrays()[0]
        self._pending.clear()
