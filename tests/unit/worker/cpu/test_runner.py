"""The memory of a runner whose model other ranks compute with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.reference_models import make_model

from shmllm.config.engine import CacheConfig, EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.parallel.memory import GroupMemory
from shmllm.worker.cpu.part import CpuPart
from shmllm.worker.cpu.runner import CpuRunner
from shmllm.worker.ranks import NoRanks


class SmallerRank(NoRanks):
    """A group with a rank that has memory for fewer blocks."""

    def together(self, own: Callable[[], Any], name: str, *arguments: Any) -> list[Any]:
        assert name == "size_cache"
        size = own()
        return [size, replace(size, num_blocks=7, num_bytes=2 * size.num_bytes)]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    make_model("llama", tmp_path)
    load, cache = LoadConfig(str(tmp_path), dtype="float32"), CacheConfig(memory_bytes=2**22)
    return EngineConfig(load, cache, num_threads=1)


def test_all_ranks_have_as_many_blocks_as_fit_everywhere(config: EngineConfig) -> None:
    assert CpuRunner(config, ranks=NoRanks(1)).info.num_blocks > 7
    assert CpuRunner(config, ranks=SmallerRank(1)).info.num_blocks == 6


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_only_rank_0_needs_memory_for_all_ranks(config: EngineConfig, is_pipeline: bool) -> None:
    first = GroupMemory.create(2, is_pipeline)
    second = GroupMemory(os.dup(first.fd), 1, 2, is_pipeline)
    kinds = [CpuPart(config, memory, 1).pool.kind for memory in (first, second)]
    second.close()
    first.close()
    assert kinds == ["memory for each of 2 processes", "memory"]
