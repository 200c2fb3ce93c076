"""Arena: what tensors cut from it are like, and that counting agrees with cutting."""

from __future__ import annotations

import mmap

import pytest
import torch

from shmllm.errors import EngineStartError
from shmllm.worker.arena import ALIGNMENT_BYTES, Arena, CountingAllocator, padded_bytes

SHAPES = [
    ((3, 5), torch.float32),
    ((7,), torch.bfloat16),
    ((1, 1, 1), torch.float16),
    ((16, 4), torch.float32),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((16,), torch.float32, 64),
        ((17,), torch.float32, 128),
        ((33,), torch.bfloat16, 128),
        ((1,), torch.float16, 64),
        ((0, 4), torch.float32, 0),
    ],
)
def test_sizes_are_rounded_up_to_the_alignment(shape, dtype, size):
    assert padded_bytes(shape, dtype) == size


def test_what_the_counter_counts_is_exactly_enough():
    counter = CountingAllocator()
    for shape, dtype in SHAPES:
        assert counter.take(shape, dtype).device.type == "meta"
    arena = Arena(counter.num_bytes, "a test")
    for shape, dtype in SHAPES:
        tensor = arena.take(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    with pytest.raises(AssertionError, match="too small"):
        arena.take((1,), torch.float32)


def test_tensors_are_zeroed_aligned_and_apart():
    arena = Arena(1024, "a test")
    tensors = [arena.take(shape, dtype) for shape, dtype in SHAPES]
    for index, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert not tensor.any()
        tensor.fill_(index + 1)
    assert [float(tensor.unique()) for tensor in tensors] == [1, 2, 3, 4]


def test_a_refused_mapping_names_purpose_and_size(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(EngineStartError, match=r"the weights: 2,048 MiB .*Cannot allocate memory"):
        Arena(2**31, "the weights")
