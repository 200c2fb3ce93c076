"""`Transfers` reuses a pinned buffer only when no copy and no reader needs it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.worker.gpu.transfers import ALIGNMENT, Transfers


class SlowDevice:
    """A device that finishes copies when the test calls `finish`."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_done = 0
        self.events: list[SlowEvent] = []
        self.buffers: list[torch.Tensor] = []

    def pinned(self, shape, dtype):
        self.buffers.append(torch.zeros(shape, dtype=dtype))
        return self.buffers[-1]

    def copy_ahead(self, target, source):
        target.copy_(source)

    def event(self, timing=False):
        return SlowEvent(self)

    def finish(self, count=1) -> None:
        """Finish the oldest unfinished copies."""
        for event in self.events[:count]:
            event.is_reached = True
        del self.events[:count]


class SlowEvent:
    def __init__(self, device: SlowDevice) -> None:
        self.device = device
        self.is_reached = True

    def record(self) -> None:
        assert self.is_reached, "the buffer was reused while it was being copied"
        self.is_reached = False
        self.device.events.append(self)

    def wait(self) -> None:
        while not self.is_reached:
            self.device.finish()

    def is_done(self) -> bool:
        return self.is_reached


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


ARRAYS = [
    np.arange(5, dtype=np.int64) - 2**40,
    np.zeros(0, np.int32),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([0.5, -np.inf, np.nan], np.float32),
]


def test_arrays_arrive_unchanged(device):
    tensors = Transfers(device).send(*ARRAYS)
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0 or not tensor.numel()
        assert np.array_equal(tensor.numpy(), array, equal_nan=array.dtype == np.float32)
        assert tensor.numpy().dtype == array.dtype


def test_arrays_come_back_unchanged(device):
    fetched = Transfers(device).fetch(*(torch.from_numpy(array) for array in ARRAYS))
    for got, array in zip(fetched.arrays(), ARRAYS, strict=True):
        assert got.dtype == array.dtype
        assert np.array_equal(got, array.ravel(), equal_nan=array.dtype == np.float32)


def test_a_buffer_that_is_being_copied_is_not_reused(device):
    transfers = Transfers(device)
    for number in range(3):
        transfers.send(np.full(4, number))
    assert len(device.buffers) == 3
    assert [int(buffer.view(torch.int64)[0]) for buffer in device.buffers] == [0, 1, 2]
    device.finish(2)
    for number in (3, 4, 5):
        transfers.send(np.full(4, number))
    assert [int(buffer.view(torch.int64)[0]) for buffer in device.buffers] == [3, 4, 2, 5]


def test_a_fetched_buffer_is_not_reused_before_it_is_read(device):
    transfers = Transfers(device)
    first = transfers.fetch(torch.full((3,), 1))
    device.finish()
    second = transfers.fetch(torch.full((3,), 2))
    transfers.send(np.full(4, 3))
    (got,) = first.arrays()
    transfers.fetch(torch.full((3,), 4))
    assert len(device.buffers) == 3
    assert got.tolist() == [1, 1, 1]
    assert second.arrays()[0].tolist() == [2, 2, 2]


def test_a_buffer_is_large_enough(device):
    transfers = Transfers(device)
    for size in (10, 100_000, 10, 100_000, 50_000):
        (sent,) = transfers.send(np.arange(size))
        assert sent.tolist() == list(range(size))
        device.finish()
    assert len(device.buffers) == 2


def test_empty_arrays_are_sent_and_fetched(device):
    transfers = Transfers(device)
    assert transfers.send(np.zeros(0, np.int64))[0].shape == (0,)
    assert transfers.fetch(torch.zeros(0, dtype=torch.int64)).arrays()[0].shape == (0,)


def test_send_ahead_copies_into_its_target(device):
    target = torch.zeros(64, dtype=torch.uint8)
    transfers = Transfers(device)
    sent = transfers.send_ahead(target, np.arange(5, dtype=np.int64))
    assert sent.tolist() == [0, 1, 2, 3, 4]
    assert sent.data_ptr() == target.data_ptr()
    transfers.send_ahead(torch.zeros_like(target), np.arange(5, 10, dtype=np.int64))
    assert len(device.buffers) == 2, "the first buffer is still being copied"
    assert sent.tolist() == [0, 1, 2, 3, 4]
