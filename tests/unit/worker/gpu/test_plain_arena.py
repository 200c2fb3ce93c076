"""The arena that cannot give its memory back."""

from __future__ import annotations

import pytest
import torch

from shmllm.errors import EngineStartError, RequestError
from shmllm.worker.arena import ALIGNMENT_BYTES, Contents, CountingAllocator
from shmllm.worker.gpu.plain_arena import PlainArena

SHAPES = [
    ((3, 5), torch.float32),
    ((7,), torch.bfloat16),
    ((0, 4), torch.float32),
    ((), torch.half),
]
HOST = torch.device("cpu")


def test_tensors_are_zeroed_aligned_and_apart():
    counter = CountingAllocator()
    for shape, dtype in SHAPES:
        counter.allocate(shape, dtype)
    arena = PlainArena(counter.num_bytes, "a test", HOST, "of a test")
    tensors = [arena.allocate(shape, dtype) for shape, dtype in SHAPES]
    for index, (tensor, (shape, dtype)) in enumerate(zip(tensors, SHAPES, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert not tensor.numel() or tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert not tensor.any()
        tensor.fill_(index + 1)
    assert [float(tensor.sum()) for tensor in tensors] == [15.0, 14.0, 0.0, 4.0]
    assert arena.resident_bytes == arena.num_bytes == counter.num_bytes
    with pytest.raises(AssertionError, match="too small"):
        arena.allocate((1,), torch.float32)


def test_release_is_an_error_with_the_reason():
    arena = PlainArena(64, "a test", HOST, "No module named 'cuda'")
    with pytest.raises(RequestError, match=r"No module named 'cuda'.*needs the package cuda-b"):
        arena.release(keep=True)
    assert arena.contents is Contents.PRESENT
    arena.restore()


def test_too_little_memory_is_a_start_error():
    with pytest.raises(EngineStartError, match=r"no memory for the weights: .* MiB were asked"):
        PlainArena(2**60, "the weights", HOST, "of a test")
