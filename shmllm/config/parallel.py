"""The options for several processes that compute one model."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.config.options import Section, Whole, option
from shmllm.errors import EngineStartError

MOST_PROCESSES = 64
"""The most processes that compute one model."""


@dataclass(frozen=True, slots=True)
class ParallelConfig(Section):
    """Several processes that compute one model.

    Attributes:
        pool_size: the number of engines of the pool that this engine belongs to.
        pool_index: its index in the pool.
        num_starting: the number of engines of the pool that load their models at the same time.
    """

    tensor_parallel_size: int = option(
        1,
        "Processes that each compute a part of every layer. On a CPU they divide num_threads and "
        "kv_cache_memory_bytes between them; else each has a GPU, with a KV cache of that size.",
        Whole(1, MOST_PROCESSES),
    )
    pipeline_parallel_size: int = option(
        1,
        "Processes that each compute some of the layers, on a CPU, of as many batches at once: "
        "each of them has up to max_num_seqs requests.",
        Whole(1, MOST_PROCESSES),
    )
    pool_size: int = 1
    pool_index: int = 0
    num_starting: int = 1

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.tensor_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise EngineStartError(
                f"tensor_parallel_size {self.tensor_parallel_size} and pipeline_parallel_size "
                f"{self.pipeline_parallel_size} are not possible together: leave one of them out"
            )

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def option(self) -> str:
        """The option that asks for several processes, with its value."""
        if self.tensor_parallel_size > 1:
            return f"tensor_parallel_size {self.tensor_parallel_size}"
        return f"pipeline_parallel_size {self.pipeline_parallel_size}"
