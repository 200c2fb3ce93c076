"""The options for several processes that compute one model."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.config.options import Section, Whole, option


@dataclass(frozen=True, slots=True)
class ParallelConfig(Section):
    """Several processes that compute one model."""

    tensor_parallel_size: int = option(
        1,
        "Processes that each compute a part of every layer, on a CPU. They divide num_threads and "
        "kv_cache_memory_bytes between them.",
        Whole(1, 64),
    )
