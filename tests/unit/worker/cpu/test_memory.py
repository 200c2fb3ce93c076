"""How much host memory is free, and how much of it the KV cache gets by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.cache_shapes import one_group

from shmllm.config.engine import CacheConfig
from shmllm.errors import EngineStartError
from shmllm.worker.cpu import memory
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.cpu.memory import HostMemory, resident_bytes
from shmllm.worker.memory import CacheSize, check_weights_fit

GIB, MIB = 2**30, 2**20


@pytest.fixture
def free(monkeypatch):
    """A function that sets how much memory is free."""

    def set_free(num_bytes):
        monkeypatch.setattr(memory, "available_memory_bytes", lambda: num_bytes)

    set_free(64 * GIB)
    return set_free


@pytest.mark.parametrize(
    ("available", "cache"),
    [(64 * GIB, 2 * GIB), (8 * GIB, 2 * GIB), (4 * GIB, GIB), (4 * MIB, MIB)],
)
def test_the_default_is_2_gib_or_a_quarter_of_the_free_memory(free, available, cache):
    free(available)
    size = HostMemory().size_cache(CacheConfig(), one_group(4096), 128)
    assert size == CacheSize(cache // 4096, 1, cache, 128, None)


def test_a_configured_size_does_not_depend_on_the_free_memory(free):
    free(0)
    size = HostMemory().size_cache(CacheConfig(16, 100_000), one_group(1000), 64)
    assert size.num_blocks == 100


def test_rank_0_checks_the_sum_and_each_other_rank_its_own_part(free):
    free(8 * MIB)
    first, second = HostMemory(2, 2), HostMemory(2)
    check_weights_fit(4 * MIB, "float32", first)
    with pytest.raises(EngineStartError, match=r"need 5 MiB .* 4 MiB of memory for each of 2 pro"):
        check_weights_fit(5 * MIB, "float32", first)
    free(4 * MIB)  # rank 0 has loaded its part
    check_weights_fit(4 * MIB, "float32", second)
    with pytest.raises(EngineStartError, match="need 5 MiB in float32 and 4 MiB of memory are"):
        check_weights_fit(5 * MIB, "float32", second)


MEMINFO = "MemTotal:       8000 kB\nMemAvailable:   5000 kB\nCached: 1 kB\n"


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the contents of meminfo, and of a cgroup's limit and usage."""

    def describe(limit=None, used=None, meminfo=MEMINFO):
        files = {
            "/proc/meminfo": meminfo,
            "/sys/fs/cgroup/memory.max": limit,
            "/sys/fs/cgroup/memory.current": used,
        }

        def read_text(path, *_args, **_options):
            content = files[str(path)]
            if content is None:
                raise FileNotFoundError(path)
            return content

        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get)

    return describe


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 5000 * 1024),
        ({"limit": "max\n", "used": "77\n"}, 5000 * 1024),
        ({"limit": "3000000\n", "used": "1000000\n"}, 2_000_000),
        ({"limit": "9000000\n", "used": "1000000\n"}, 5000 * 1024),
        ({"limit": "3000\n", "used": "4000\n"}, 0),
        ({"meminfo": "MemTotal: 8000 kB\n"}, 40960),
    ],
    ids=["no cgroup", "no limit", "tight limit", "wide limit", "over the limit", "old kernel"],
)
def test_free_memory_is_the_smaller_of_kernel_and_cgroup(machine, files, available):
    machine(**files)
    assert HostMemory().free_bytes() == available


def test_resident_bytes_count_touched_pages():
    arena = HostArena(2**26, "a test")
    tensor = arena.allocate((2**26,), torch.uint8)
    before = resident_bytes()
    tensor.fill_(1)
    assert resident_bytes() - before == pytest.approx(2**26, rel=0.1)
    arena.release()
    assert resident_bytes() - before < 2**24
