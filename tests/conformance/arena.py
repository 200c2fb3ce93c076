"""The tests that every arena passes; a subclass makes the arena."""

from __future__ import annotations

import pytest
import torch

from shmllm.worker.arena import ALIGNMENT_BYTES, Arena, Contents, CountingAllocator

SHAPES = [
    ((3, 5), torch.float32),
    ((7,), torch.bfloat16),
    ((1, 1, 1), torch.float16),
    ((16, 4), torch.float32),
    ((0, 4), torch.float32),
    ((300, 1000), torch.float32),
]


class ArenaConformance:
    """Tests of an arena. A subclass implements `make`."""

    def make(self, num_bytes: int) -> Arena:
        raise NotImplementedError

    @pytest.fixture
    def arena(self):
        counter = CountingAllocator()
        for shape, dtype in SHAPES:
            assert counter.allocate(shape, dtype).device.type == "meta"
        return self.make(counter.num_bytes)

    @pytest.fixture
    def tensors(self, arena):
        return [arena.allocate(shape, dtype) for shape, dtype in SHAPES]

    @staticmethod
    def write(tensors):
        for index, tensor in enumerate(tensors):
            tensor.fill_(index + 1)

    @staticmethod
    def values(tensors):
        return [float(tensor.double().sum()) for tensor in tensors]

    def test_the_counted_size_is_exactly_enough(self, arena, tensors):
        for tensor, (shape, dtype) in zip(tensors, SHAPES, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
            assert tensor.is_contiguous()
        with pytest.raises(AssertionError, match="too small"):
            arena.allocate((1,), torch.float32)

    def test_tensors_are_zeroed_aligned_and_apart(self, tensors):
        for tensor in tensors:
            assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
            assert not tensor.any()
        self.write(tensors)
        expected = [float((i + 1) * tensor.numel()) for i, tensor in enumerate(tensors)]
        assert self.values(tensors) == expected

    def test_released_memory_is_restored_as_zeros_at_the_same_addresses(self, arena, tensors):
        self.write(tensors)
        before = arena.resident_bytes
        assert before >= 1_200_000
        addresses = [tensor.data_ptr() for tensor in tensors]
        arena.release()
        assert arena.contents is Contents.LOST
        assert arena.resident_bytes == 0
        arena.restore()
        assert arena.contents is Contents.PRESENT
        assert self.values(tensors) == [0.0] * len(tensors)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        self.write(tensors)
        assert arena.resident_bytes == before

    def test_kept_contents_are_restored(self, arena, tensors):
        self.write(tensors)
        expected = self.values(tensors)
        arena.release(keep=True)
        assert arena.contents is Contents.KEPT
        arena.restore()
        assert self.values(tensors) == expected

    def test_kept_contents_can_be_discarded_later(self, arena, tensors):
        self.write(tensors)
        arena.release(keep=True)
        arena.release()
        assert arena.contents is Contents.LOST
        assert arena.resident_bytes == 0
        arena.restore()
        assert not any(self.values(tensors))

    def test_repeated_calls_change_nothing(self, arena, tensors):
        self.write(tensors)
        expected = self.values(tensors)
        arena.restore()
        assert self.values(tensors) == expected
        arena.release(keep=True)
        arena.release(keep=True)
        arena.restore()
        arena.restore()
        assert self.values(tensors) == expected
        arena.release()
        arena.release()
        arena.release(keep=True)
        assert arena.contents is Contents.LOST
        arena.restore()
        assert not any(self.values(tensors))

    def test_many_releases_and_restores_change_nothing(self, arena, tensors):
        self.write(tensors)
        expected, resident = self.values(tensors), arena.resident_bytes
        for round_ in range(30):
            arena.release(keep=round_ % 2 == 0)
            arena.restore()
            self.write(tensors)
        assert (self.values(tensors), arena.resident_bytes) == (expected, resident)
