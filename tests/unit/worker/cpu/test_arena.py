"""The arena of a CPU: the behaviour of all arenas, and that of its pages."""

from __future__ import annotations

import mmap
import pickle

import pytest
import torch
from conformance.arena import ArenaConformance

from shmllm.errors import EngineStartError
from shmllm.worker.cpu.arena import HostArena


class TestHostArena(ArenaConformance):
    def make(self, num_bytes):
        return HostArena(num_bytes, "a test")

    def test_kept_contents_stay_in_place(self, arena, tensors):
        self.write(tensors)
        resident = arena.resident_bytes
        arena.release(keep=True)
        assert arena.resident_bytes == resident

    def test_only_touched_pages_take_memory(self):
        arena = self.make(2**26)
        tensor = arena.allocate((2**24,), torch.float32)
        assert arena.resident_bytes == 0
        tensor[: 2 * mmap.PAGESIZE // 4] = 1
        assert arena.resident_bytes == 2 * mmap.PAGESIZE

    def test_a_tensor_is_pickled_without_its_neighbours(self, tensors):
        assert len(pickle.dumps(tensors[0])) < 1000


def test_an_arena_may_be_empty():
    arena = HostArena(0, "a test")
    arena.release()
    arena.restore()
    assert arena.allocate((0,), torch.float32).numel() == 0


def test_the_error_of_a_refused_mapping_has_purpose_and_size(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(EngineStartError, match=r"the weights: 2,048 MiB .*Cannot allocate memory"):
        HostArena(2**31, "the weights")
