"""The part of a model that a rank other than 0 computes on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shmllm.config.engine import EngineConfig
from shmllm.parallel.adapters import RankAdapters
from shmllm.parallel.gpu_memory import GpuGroupMemory
from shmllm.tracing.layout import Slice
from shmllm.worker.arrays import LongArray
from shmllm.worker.gpu.device import CudaDevice, Device
from shmllm.worker.gpu.part import GpuPart
from shmllm.worker.gpu.step_messages import StepMessages, rows_of_slot
from shmllm.worker.group import Kind
from shmllm.worker.loaded_runner import Observe
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory import CacheSize
from shmllm.worker.memory_owners import MemoryOwners

make_device: Callable[[int], Device] = CudaDevice
"""Makes the device of an index; tests replace it."""


def make_gpu_part(
    config: EngineConfig, memory_fd: int, rank: int, size: int
) -> tuple[GpuGroupMemory, GpuRankPart]:
    """Load a rank's part of a model.

    Args:
        config: the configuration of the engine, with this rank's device.
        memory_fd, rank, size: see `GroupMemory`.

    Raises:
        EngineStartError: see `GpuPart`; or there is no such GPU.
    """
    memory = GpuGroupMemory(memory_fd, rank, size)
    device = make_device(int(config.device.partition(":")[2]))
    return memory, GpuRankPart(GpuPart(config, device, memory), memory)


class GpuRankPart:
    """See `rank.RankPart`.

    Args:
        part: the part.
        memory: the memory of the group.
    """

    adapters: RankAdapters | None = None
    shared = None
    traced_as = Slice.RANK_LAUNCH

    def __init__(self, part: GpuPart, memory: GpuGroupMemory) -> None:
        self._part = part
        self._memory = memory
        self.torch_device: torch.device = part.device.torch_device

    @property
    def loaded(self) -> LoadedModel:
        return self._part.loaded

    def size_cache(self) -> CacheSize:
        return self._part.size_cache()

    def build(self, size: CacheSize) -> MemoryOwners:
        part = self._part
        self._messages = StepMessages(self._memory, part.resources.inputs)
        part.build(size)
        lora = part.resources.lora
        self.adapters = None if lora is None else RankAdapters(lora)
        part.device.synchronize()
        loaded, buffers = part.loaded, [part.resources.buffers.arena]
        num_bytes = part.captured.num_bytes
        return MemoryOwners(
            loaded.model, loaded.weights, part.kv_cache, (), part.pool, buffers, num_bytes
        )

    @torch.inference_mode()
    def play(self, kind: Kind, slot: int) -> None:
        part, program = self._part, self._part.program
        inputs, buffers = part.resources.inputs, part.resources.buffers
        if kind is Kind.FURTHER:
            assert part.drafting is not None, "rank 0 drafts"
            part.drafting.play(self._messages.read(slot))
            return
        program.begin()
        if kind is Kind.SCORING:
            program.compute_logits(buffers.results[rows_of_slot(slot)])
            return
        step = self._messages.read(slot)
        inputs.change_blocks(step.changes)
        part.copy_states(step.state_copies)
        inputs.launch(step.packed, step.descriptor, step.is_repeat)
        if step.adapters is not None:
            self._send_adapters(*step.adapters)
        program.run(step.mode, step.descriptor, step.max_query_len)

    def _send_adapters(self, numbers: LongArray, counts: LongArray) -> None:
        lora = self._part.resources.lora
        assert lora is not None, "rank 0 has adapters"
        assert self.adapters is not None, "it is made with the program"
        lora.send(self.adapters.of(numbers.tolist()), counts)

    def observe(self, observe: Observe | None) -> None:
        """Do nothing: torch's profiler records a GPU's kernels by itself."""
