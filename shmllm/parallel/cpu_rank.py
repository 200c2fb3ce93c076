"""The part of a model that a rank other than 0 computes on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from shmllm.config.engine import EngineConfig
from shmllm.parallel.adapters import RankAdapters
from shmllm.parallel.cores import cores_of, threads_of_a_rank
from shmllm.parallel.memory import GroupMemory
from shmllm.tracing.layout import Slice
from shmllm.worker.arrays import IntArray
from shmllm.worker.cpu.part import CpuPart
from shmllm.worker.cpu.pipeline import CpuPipeline
from shmllm.worker.cpu.program import CpuProgram
from shmllm.worker.cpu.runner import TABLES
from shmllm.worker.cpu.shared_cache import CpuSharedCache
from shmllm.worker.group import Kind
from shmllm.worker.loaded_runner import Observe
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory import CacheSize
from shmllm.worker.memory_owners import MemoryOwners
from shmllm_kernels.cpu.group import AwaitMore


@dataclass(slots=True)
class _Tables:
    """See `worker.batch.StepTables`."""

    block_tables: IntArray
    max_samples: int


class CpuRankPart:
    """See `rank.RankPart`.

    Args:
        config: the configuration of the engine.
        memory: the memory of the group.

    Raises:
        EngineStartError: see `CpuPart`.
    """

    adapters: RankAdapters | None = None
    torch_device = torch.device("cpu")
    traced_as = Slice.RANK_STEP

    def __init__(self, config: EngineConfig, memory: GroupMemory) -> None:
        num_threads = threads_of_a_rank(config.num_threads, config.parallel)
        parallel, size = config.parallel, memory.size
        place = parallel.pool_index * size + memory.rank
        cores = cores_of(place, num_threads, parallel.pool_size * size)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        memory.look = AwaitMore(memory.step.ctypes.data)
        self._config = config
        self._memory = memory
        self._part = CpuPart(config, memory, num_threads)

    @property
    def loaded(self) -> LoadedModel:
        return self._part.loaded

    @property
    def shared(self) -> CpuSharedCache | None:
        return self._part.shared

    def size_cache(self) -> CacheSize:
        return self._part.size_cache()

    def build(self, size: CacheSize) -> MemoryOwners:
        tables = self._memory.found(TABLES)
        num_rows, max_drafts = tables.shape[1], self._config.max_drafts
        part = self._part
        part.build(size, _Tables(tables, num_rows + max_drafts))
        self.adapters = None if part.lora is None else RankAdapters(part.lora)
        program = part.program
        assert isinstance(program, CpuProgram | CpuPipeline), "the options refuse other models"
        self._program = program
        loaded, workspaces = part.loaded, [program.buffers]
        return MemoryOwners(loaded.model, loaded.weights, part.kv_cache, workspaces, part.pool)

    def play(self, kind: Kind, slot: int) -> None:
        if kind is Kind.SHARING:
            assert self.shared is not None, "the engine shares blocks"
            self.shared.copy()
            return
        if kind is Kind.FURTHER:
            assert self._part.further is not None, "the model has a further layer"
            self._part.further.play()
            return
        if kind is Kind.STEP:
            self._part.copy_states(self._program.inputs_of(slot))
        self._program.play(kind, slot)

    def observe(self, observe: Observe | None) -> None:
        self._program.observe = observe
