"""The KV cache's share of a device's memory, and sleeping, on fake devices."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from support.cache_shapes import one_group
from support.fake_cuda_driver import FakeDriver
from support.model_helpers import our_logits, reference_model, save

from shmllm.config.engine import CacheConfig
from shmllm.errors import EngineStartError, RequestError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.weights import load_weights
from shmllm.outputs.sleep_report import SleepState
from shmllm.worker.arena import Contents, CountingAllocator
from shmllm.worker.gpu import memory
from shmllm.worker.gpu.arena import CudaArena
from shmllm.worker.gpu.memory import (
    LAUNCHES,
    MANY_LAUNCHES,
    DeviceMemory,
    estimate_graph_bytes,
)
from shmllm.worker.memory_owners import MemoryOwners

MIB = 2**20
TOTAL = 1000 * MIB
BLOCK = MIB // 4  # bytes of a block in all layers


class FakeDevice:
    """A device whose allocator keeps freed memory, as torch's does.

    Attributes:
        others: memory of other processes, in bytes.
    """

    def __init__(self, others=0):
        self.others = others
        self.arenas = self.allocated = self.peak = self.reserved = self.libraries = 0

    def total_bytes(self):
        return TOTAL

    def free_bytes(self):
        return TOTAL - self.others - self.arenas - self.reserved - self.libraries

    def allocated_bytes(self):
        return self.allocated

    def peak_bytes(self):
        return self.peak

    def reset_peak(self):
        self.peak = self.allocated

    def synchronize(self):
        pass

    def trim(self):
        self.reserved = self.allocated

    def allocate(self, num_bytes):
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def make_arena(self, num_bytes, purpose):
        self.arenas += num_bytes
        return SimpleNamespace(num_bytes=num_bytes, resident_bytes=num_bytes)


class Engine:
    """An engine with weights and buffers. A step takes 100 MiB, and libraries take 20 MiB in the
    first step."""

    def __init__(self, others=0, weights=300, buffers=30):
        self.device = FakeDevice(others * MIB)
        self.memory = DeviceMemory(self.device)
        self.weights = self.memory.make_arena(weights * MIB, "weights")
        self.memory.make_arena(buffers * MIB, "buffers")
        self.device.allocate(10 * MIB)
        self.num_profiled = 0

    def profile(self):
        self.num_profiled += 1
        self.device.allocate(100 * MIB)
        self.device.allocate(-100 * MIB)
        self.device.libraries = 20 * MIB

    def size(self, config=None, max_model_len=16, graphs=40):
        return self.memory.size_cache(
            config or CacheConfig(gpu_memory_utilization=0.9),
            one_group(BLOCK),
            max_model_len,
            self.weights.resident_bytes,
            graphs * MIB,
            self.profile,
        )


def test_the_cache_gets_what_weights_steps_and_graphs_leave(caplog):
    engine = Engine()
    with caplog.at_level(logging.INFO):
        size = engine.size()
    left = 900 - 300 - (30 + 10 + 100 + 20) - 40
    assert (size.num_blocks, size.max_model_len, size.warning) == (left * MIB // BLOCK, 16, None)
    assert (
        "of 1,000 MiB on the device, gpu_memory_utilization=0.9 is 900; others have 0, weights "
        f"300, steps 160, graphs 40 (estimated); {left} MiB are left" in caplog.text
    )
    assert "\n" not in caplog.records[0].message


@pytest.mark.parametrize(("others", "left"), [(50, 400), (100, 400), (300, 200), (499, 1)])
def test_memory_of_others_counts_only_beyond_the_unused_fraction(others, left):
    assert Engine(others).size().num_blocks == left * MIB // BLOCK


def test_two_engines_can_share_a_device():
    first = Engine().size(CacheConfig(gpu_memory_utilization=0.55)).num_blocks
    second = Engine(others=450).size(CacheConfig(gpu_memory_utilization=0.55)).num_blocks
    assert first == second == 50 * MIB // BLOCK


def test_memory_that_torch_has_cached_is_not_counted_twice():
    engine = Engine()
    engine.device.allocate(80 * MIB)
    engine.device.allocate(-80 * MIB)
    assert engine.size().num_blocks == 400 * MIB // BLOCK


def test_a_device_without_cached_memory_is_measured_by_its_peak(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(FakeDevice, "free_bytes", lambda d: TOTAL - d.arenas - d.allocated)
    assert engine.size().num_blocks == (400 + 20) * MIB // BLOCK


def test_a_configured_size_is_used_without_running_a_step():
    engine = Engine(others=900)
    size = engine.size(CacheConfig(memory_bytes=10 * MIB))
    assert size.num_blocks == 40
    assert engine.num_profiled == 0


def test_the_error_of_a_cache_that_is_too_small_has_all_numbers():
    with pytest.raises(EngineStartError, match="not enough memory for one sequence") as caught:
        Engine(others=600).size()
    for words in (
        "what is left for the KV cache is 0 and",
        f"2 blocks of 16 tokens, needs {2 * BLOCK:,}",
        "others have 600, weights 300, steps 160, graphs 40 (estimated); -100 MiB are left",
        "raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs",
    ):
        assert words in str(caught.value)


def test_a_shorter_limit_is_a_warning_with_the_numbers():
    size = Engine(others=499).size(max_model_len=100)
    assert (size.num_blocks, size.max_model_len) == (4, 48)
    assert size.warning.startswith("max_model_len is 48 instead of 100: the KV cache of 1 MiB")
    assert "weights 300, steps 160" in size.warning


def test_a_small_model_gets_no_more_blocks_than_the_host_should_keep(monkeypatch):
    monkeypatch.setattr(memory, "MOST_BLOCKS", 50)
    assert Engine().size().num_blocks == 50
    assert Engine().size(max_model_len=1000).num_blocks == 64
    assert Engine().size(CacheConfig(memory_bytes=25 * MIB)).num_blocks == 100


def test_the_estimate_of_graph_memory():
    assert estimate_graph_bytes(0) == 0
    few, many = (estimate_graph_bytes(51 * 32, count) for count in (LAUNCHES, MANY_LAUNCHES))
    assert 300 * MIB < few == estimate_graph_bytes(51 * 32) < 1000 * MIB
    assert many > 2 * few


class DriverDevice(FakeDevice):
    """A device with real arenas, on a fake driver."""

    def __init__(self, driver):
        super().__init__()
        self.driver = driver

    def free_bytes(self):
        return self.driver.free_bytes - self.reserved

    def make_arena(self, num_bytes, purpose):
        return CudaArena(num_bytes, purpose, torch.device("cpu"), self.driver)


@pytest.fixture
def driver():
    return FakeDriver(64 * MIB)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    model = reference_model("qwen3", hidden_size=512, intermediate_size=2048)
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture
def model_and_owners(driver, directory):
    """A model on a device, its `MemoryOwners`, and its arenas."""
    config = ModelConfig.from_directory(directory)
    pool = DeviceMemory(DriverDevice(driver))
    counter = CountingAllocator()
    create_model(config, torch.float32, counter.allocate, None)
    arenas = [pool.make_arena(size, "a test") for size in (counter.num_bytes, 16 * MIB, 2 * MIB)]
    weights, cache, buffers = arenas
    model = create_model(config, torch.float32, weights.allocate, None)
    load_weights(model, directory)
    yield model, MemoryOwners(model, weights, cache, [], pool, [buffers], graph_bytes=MIB), arenas
    for arena in arenas:
        arena.close()
    assert driver.is_clean


def test_device_bytes_are_counted_by_owner(model_and_owners, driver):
    _, owners, (weights, _, _) = model_and_owners
    driver.free_bytes -= 3 * MIB  # graphs and libraries
    found = owners.measure()
    assert (found.kv_cache, found.workspaces) == (16 * MIB, 2 * MIB)
    assert found.weights == weights.resident_bytes > weights.num_bytes - MIB
    assert (found.graphs, found.rest) == (MIB, 2 * MIB)
    assert found.total == 64 * MIB - driver.free_bytes


@pytest.mark.parametrize("keep", [True, False])
def test_all_memory_is_released_and_restored(model_and_owners, driver, keep):
    model, owners, _ = model_and_owners
    expected = our_logits(model, [3, 14, 15])
    held = driver.free_bytes
    owners.release(SleepState.WEIGHTS, keep)
    owners.release(SleepState.KV_CACHE, keep=False)
    owners.tidy()
    found = owners.measure()
    assert (found.weights, found.kv_cache, found.workspaces) == (0, 0, 0)
    assert driver.free_bytes == 64 * MIB
    assert bool(owners.num_missing) != keep
    owners.restore(SleepState.WEIGHTS)
    owners.restore(SleepState.KV_CACHE)
    assert driver.free_bytes == held
    if keep:
        assert torch.equal(our_logits(model, [3, 14, 15]), expected)


@pytest.mark.parametrize("part", [SleepState.WEIGHTS, SleepState.KV_CACHE])
@pytest.mark.parametrize("keep", [True, False])
def test_a_part_needs_free_memory_to_wake_up(model_and_owners, driver, part, keep):
    _, owners, arenas = model_and_owners
    owners.release(part, keep)
    free, driver.free_bytes = driver.free_bytes, 5 * MIB
    with pytest.raises(RequestError, match=r"they need \d+ MiB and 5 MiB of device memory are fr"):
        owners.restore(part)
    assert owners.measure().total == 64 * MIB - 5 * MIB
    driver.free_bytes = free
    owners.restore(part)
    assert all(arena.contents is Contents.PRESENT for arena in arenas)


def test_a_failed_restore_leaves_the_whole_part_asleep(model_and_owners, driver):
    _, owners, (_, cache, buffers) = model_and_owners
    owners.release(SleepState.KV_CACHE, keep=False)
    buffers.restore = lambda: (_ for _ in ()).throw(MemoryError("taken"))
    with pytest.raises(RequestError, match="kv_cache cannot wake up: taken"):
        owners.restore(SleepState.KV_CACHE)
    del buffers.restore
    assert (cache.contents, buffers.contents) == (Contents.LOST, Contents.LOST)
    owners.restore(SleepState.KV_CACHE)


def test_weights_that_cannot_be_kept_stay_awake(model_and_owners, monkeypatch):
    model, owners, (weights, _, _) = model_and_owners

    def refuse(*_arguments):
        raise MemoryError("no 12 MiB of host memory")

    monkeypatch.setattr("shmllm.worker.gpu.arena.HostCopy", refuse)
    with pytest.raises(RequestError, match="weights cannot be kept: no 12 MiB of host memory"):
        owners.release(SleepState.WEIGHTS, keep=True)
    assert not model.is_asleep
    assert weights.contents is Contents.PRESENT
