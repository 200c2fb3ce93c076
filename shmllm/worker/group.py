"""What the processes of a group that computes one model share, and the memory of one that is alone.

This module owns the interface of a group's memory. It must not know processes, which
`parallel.memory` has, nor devices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.shard import WHOLE, Shard
from shmllm.worker.arrays import LongArray


class Kind(IntEnum):
    """What the ranks do in a step.

    STEP: a step of the model. SCORING: logits of some hidden states. COMMAND: something else, which
    each is told by itself. SHARING: copies of blocks that engines share. FURTHER: a step of the
    layer that predicts a further token.
    """

    STEP = 1
    SCORING = 2
    COMMAND = 3
    SHARING = 4
    FURTHER = 5


class SharedArrays(Protocol):
    """Memory that all ranks of a group find by names."""

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        """Return an array of zeros that all ranks share by its name."""

    def floats(self, name: str, *shape: int) -> Tensor:
        """As `array`, a tensor of float32, which is only of use within a step."""

    def settle(self) -> None:
        """Wait until the other ranks have left the step that read these arrays last: before that,
        this process must not write them. Raises as `Group.check`."""


class Group(SharedArrays, Protocol):
    """The memory of a group.

    Attributes:
        rank: the number of this process in it.
        size: the number of processes.
        shard: its place if the ranks divide each layer.
        num_stages: into how many stages the layers are divided.
        step: (1,) int64, the number of the step.
        ended: (1,) int64, not 0 when the group has ended, because one of its processes has.
        waits: (2,) int64 of this process alone: whether it measures how long it waits for other
            ranks, and the ns that it has waited. Only kernels of CPUs measure that.
        label: 1 + the number by which traces name the next step; 0: it has none.
        turn: held while the ranks of a tensor parallel group do something, a step or a command:
            kernels read the number of the step, so no other may begin.
    """

    rank: int
    size: int
    shard: Shard
    num_stages: int
    step: LongArray
    ended: LongArray
    waits: LongArray
    label: int

    @property
    def turn(self) -> AbstractContextManager[object]: ...

    @property
    def workspace_bytes(self) -> int:
        """The memory that all `floats` take now, in bytes."""

    def drop_workspace(self) -> None:
        """Give the memory of all `floats` back. Called in rank 0, between steps."""

    def divide(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of this process's part of a model.

        Raises:
            EngineStartError: the model cannot be divided so.
        """

    def settle(self, step: int | None = None) -> None:
        """As `SharedArrays.settle`: wait until the other ranks have left a step, or all steps."""

    def begin(self, kind: Kind, slot: int = 0) -> None:
        """Let the other ranks begin a step; this process has written what they read.

        Args:
            kind: what they do.
            slot: which of a pipeline's batches it is; on GPUs, where the step's inputs are, or,
                of a scoring, which hidden states are scored (`gpu.step_messages`).
        """

    def check(self) -> None:
        """Raise if the group has ended: what the step has computed is undefined then."""

    def end(self) -> None:
        """End the group: this process cannot compute its part of a step that has begun."""


class Alone:
    """The memory of a process that is no part of a group."""

    rank, size, num_stages = 0, 1, 1
    workspace_bytes = 0

    def __init__(self) -> None:
        self.shard = WHOLE
        self.step: LongArray = np.zeros(1, np.int64)
        self.ended: LongArray = np.zeros(1, np.int64)
        self.waits: LongArray = np.zeros(2, np.int64)
        self.label = 0
        self.turn: AbstractContextManager[object] = nullcontext()

    def divide(self, config: ModelConfig) -> ModelConfig:
        return config

    def array(self, name: str, *shape: int, dtype: str = "int64") -> npt.NDArray[Any]:
        return np.zeros(shape, dtype)

    def floats(self, name: str, *shape: int) -> Tensor:
        return torch.zeros(shape)

    def drop_workspace(self) -> None:
        pass

    def settle(self, step: int | None = None) -> None:
        pass

    def end(self) -> None:
        pass

    def begin(self, kind: Kind, slot: int = 0) -> None:
        pass

    def check(self) -> None:
        pass
