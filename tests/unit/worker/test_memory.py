"""How large the KV cache is made, and what is said when memory is short."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmllm.config.engine import CacheConfig
from shmllm.errors import EngineStartError
from shmllm.worker import memory

GIB, MIB = 2**30, 2**20


@pytest.fixture
def free(monkeypatch):
    """Sets how much memory is free."""

    def set_free(num_bytes):
        monkeypatch.setattr(memory, "available_memory_bytes", lambda: num_bytes)

    set_free(64 * GIB)
    return set_free


@pytest.mark.parametrize(
    ("available", "cache"),
    [(64 * GIB, 2 * GIB), (8 * GIB, 2 * GIB), (4 * GIB, GIB), (4 * MIB, MIB)],
)
def test_the_default_is_two_gibibytes_or_a_quarter_of_what_is_free(free, available, cache):
    free(available)
    size = memory.size_kv_cache(CacheConfig(), 4096, 128)
    assert size == memory.CacheSize(cache // 4096, 128, None)


def test_a_given_size_is_taken_whatever_is_free(free):
    free(0)
    size = memory.size_kv_cache(CacheConfig(16, 100_000), 1000, 64)
    assert size.num_blocks == 100


@pytest.mark.parametrize(
    ("num_bytes", "max_model_len"),
    [(8_000, 112), (8_999, 112), (7_999, 96), (2_000, 16)],
)
def test_the_longest_request_fits_beside_the_padding_block(free, num_bytes, max_model_len):
    size = memory.size_kv_cache(CacheConfig(16, num_bytes), 1000, 112)
    assert size.max_model_len == max_model_len
    assert (size.num_blocks - 1) * 16 >= size.max_model_len
    assert (size.warning is None) == (max_model_len == 112)


def test_a_shorter_limit_is_a_warning_with_both_lengths_and_the_cure(free):
    size = memory.size_kv_cache(CacheConfig(16, 5 * MIB), MIB, 2000)
    assert size.max_model_len == 64
    assert "64 instead of 2,000" in size.warning
    assert "5 MiB" in size.warning
    needed = size.warning.split("kv_cache_memory_bytes to ")[1].split(" for all")[0]
    cured = memory.size_kv_cache(CacheConfig(16, int(needed.replace(",", ""))), MIB, 2000)
    assert cured.warning is None
    less = memory.size_kv_cache(CacheConfig(16, int(needed.replace(",", "")) - 1), MIB, 2000)
    assert less.max_model_len < 2000


@pytest.mark.parametrize("num_bytes", [1, 999, 1_999])
def test_no_room_for_one_block_is_an_error_with_both_numbers(free, num_bytes):
    with pytest.raises(EngineStartError, match=f"is {num_bytes:,} and .* needs 2,000"):
        memory.size_kv_cache(CacheConfig(16, num_bytes), 1000, 64)


def test_weights_that_fit_pass(free):
    free(100 * MIB)
    memory.check_weights_fit(100 * MIB, "float32", memory.Host())


@pytest.mark.parametrize(
    ("dtype", "advises"),
    [("float32", "'bfloat16' needs half"), ("bfloat16", "'int8' needs"), ("int8", "")],
)
def test_weights_that_do_not_fit_are_an_error_with_both_numbers(free, dtype, advises):
    free(100 * MIB)
    with pytest.raises(EngineStartError, match=f"need 3,000 MiB in {dtype} and 100 MiB") as error:
        memory.check_weights_fit(3000 * MIB, dtype, memory.Host())
    assert advises in str(error.value)
    assert bool(advises) == ("; " in str(error.value))


MEMINFO = "MemTotal:       8000 kB\nMemAvailable:   5000 kB\nCached: 1 kB\n"


@pytest.fixture
def machine(monkeypatch):
    """Gives the files of a machine: meminfo, and a cgroup's limit and use."""

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
def test_available_memory_is_the_least_of_kernel_and_cgroup(machine, files, available):
    machine(**files)
    assert memory.available_memory_bytes() == available
