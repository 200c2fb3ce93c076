"""The arena of a GPU, on a fake CUDA driver that refuses calls in a wrong state."""

from __future__ import annotations

import pytest
import torch
from conformance.arena import ArenaConformance
from support.fake_cuda_driver import GRANULARITY, FakeDriver, Refusal

from shmllm.errors import EngineStartError
from shmllm.worker.arena import Contents
from shmllm.worker.gpu.arena import CudaArena

HOST = torch.device("cpu")


@pytest.fixture
def driver():
    return FakeDriver()


class TestCudaArena(ArenaConformance):
    """The chunks are so small that each arena has several."""

    @pytest.fixture(autouse=True)
    def use(self, driver):
        self.driver = driver

    def make(self, num_bytes):
        return CudaArena(num_bytes, "a test", HOST, self.driver, chunk_bytes=3 * GRANULARITY)

    def test_release_unmaps_all_chunks(self, arena, driver):
        num_chunks = driver.calls.count("cuMemMap")
        assert num_chunks > 10
        free = driver.free_bytes
        arena.release()
        assert driver.calls.count("cuMemUnmap") == num_chunks
        assert driver.free_bytes == free + arena._reserved_bytes

    def test_release_waits_for_running_work(self, arena, driver):
        driver.calls.clear()
        arena.release()
        assert driver.calls[0] == "cuCtxSynchronize"

    @pytest.mark.parametrize("state", ["awake", "kept", "lost"])
    def test_closing_frees_everything_in_every_state(self, arena, driver, state):
        if state != "awake":
            arena.release(keep=state == "kept")
        arena.close()
        arena.close()
        assert driver.is_clean
        assert driver.free_bytes == 2**30

    @pytest.mark.parametrize("keep", [True, False])
    def test_a_restore_without_enough_memory_changes_nothing(self, arena, tensors, driver, keep):
        self.write(tensors)
        expected = self.values(tensors) if keep else [0.0] * len(tensors)
        arena.release(keep)
        taken, driver.free_bytes = driver.free_bytes, 10 * GRANULARITY
        for _ in range(2):
            with pytest.raises(MemoryError, match="MiB are not free"):
                arena.restore()
            assert arena.resident_bytes == 0
            assert driver.free_bytes == 10 * GRANULARITY
            assert arena.contents is (Contents.KEPT if keep else Contents.LOST)
        driver.free_bytes = taken
        arena.restore()
        assert self.values(tensors) == expected

    def test_a_failed_call_can_be_repeated(self, arena, tensors, driver):
        self.write(tensors)
        expected = self.values(tensors)
        for name in ("cuMemUnmap", "cuMemRelease"):
            driver.fail = name
            with pytest.raises(RuntimeError, match=name):
                arena.release()
            arena.release()
            for again in ("cuMemMap", "cuMemSetAccess"):
                driver.fail = again
                with pytest.raises(RuntimeError, match=again):
                    arena.restore()
            arena.restore()
            self.write(tensors)
            assert self.values(tensors) == expected
        arena.close()
        assert driver.is_clean

    def test_the_fake_driver_refuses_wrong_calls(self, driver):
        size = GRANULARITY
        _, place = driver.cuMemAddressReserve(size, 0, 0, 0)
        _, handle = driver.cuMemCreate(size, None, 0)
        driver.cuMemMap(place, size, 0, handle, 0)
        for refused in (
            lambda: driver.cuMemMap(place, size, 0, handle, 0),
            lambda: driver.cuMemRelease(handle),
            lambda: driver.cuMemsetD8(place, 0, size),
            lambda: driver.cuMemAddressFree(place, size),
        ):
            with pytest.raises(Refusal):
                refused()


def test_the_error_of_too_little_memory_has_the_purpose_and_leaves_nothing():
    driver = FakeDriver(free_bytes=5 * GRANULARITY)
    with pytest.raises(EngineStartError, match=r"the weights: 1 MiB of device memory"):
        CudaArena(2**20, "the weights", HOST, driver, chunk_bytes=GRANULARITY)
    assert driver.is_clean
