"""`CudaArena` on a GPU."""

from __future__ import annotations

import pytest
import torch
from conformance.arena import ArenaConformance

from shmllm.worker.gpu.arena import CudaArena

DEVICE = torch.device("cuda", 0)


class TestCudaArena(ArenaConformance):
    @pytest.fixture(autouse=True)
    def closing(self):
        self.made = []
        yield
        for arena in self.made:
            arena.close()

    def make(self, num_bytes):
        self.made.append(CudaArena(num_bytes, "a test", DEVICE))
        return self.made[-1]

    def test_release_gives_the_memory_back_to_the_device(self):
        before = torch.cuda.mem_get_info(DEVICE)[0]
        arena = self.make(2**30)
        arena.release()
        assert torch.cuda.mem_get_info(DEVICE)[0] >= before - 2**26
        arena.restore()
        assert torch.cuda.mem_get_info(DEVICE)[0] <= before - 2**30 + 2**26

    def test_a_captured_graph_computes_on_restored_memory(self):
        arena = self.make(2**27)
        x, y = (arena.allocate((2**20,), torch.float32) for _ in range(2))
        torch.mul(x, 2, out=y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mul(x, 2, out=y)
        for value in (3.0, 5.0):
            arena.release()
            arena.restore()
            x.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, torch.full_like(y, 2 * value))
