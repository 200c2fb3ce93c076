"""Transfers: pinned memory is not used again while anybody may look at it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.worker.gpu.transfers import ALIGNMENT, Transfers


class SlowDevice:
    """Its copies are done when the test says so."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_done = 0
        self.events: list[SlowEvent] = []
        self.pieces: list[torch.Tensor] = []

    def pinned(self, shape, dtype):
        self.pieces.append(torch.zeros(shape, dtype=dtype))
        return self.pieces[-1]

    def copy_ahead(self, target, source):
        target.copy_(source)

    def event(self, timing=False):
        return SlowEvent(self)

    def finish(self, count=1) -> None:
        """The oldest copies under way are done."""
        for event in self.events[:count]:
            event.is_over = True
        del self.events[:count]


class SlowEvent:
    def __init__(self, device: SlowDevice) -> None:
        self.device = device
        self.is_over = True

    def record(self) -> None:
        assert self.is_over, "recorded anew while a copy was under way"
        self.is_over = False
        self.device.events.append(self)

    def wait(self) -> None:
        while not self.is_over:
            self.device.finish()

    def is_done(self) -> bool:
        return self.is_over


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


ARRAYS = [
    np.arange(5, dtype=np.int64) - 2**40,
    np.zeros(0, np.int32),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([0.5, -np.inf, np.nan], np.float32),
]


def test_arrays_arrive_as_they_are(device):
    tensors = Transfers(device).send(*ARRAYS)
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0 or not tensor.numel()
        assert np.array_equal(tensor.numpy(), array, equal_nan=array.dtype == np.float32)
        assert tensor.numpy().dtype == array.dtype


def test_arrays_come_back_as_they_were(device):
    fetched = Transfers(device).fetch(*(torch.from_numpy(array) for array in ARRAYS))
    for got, array in zip(fetched.arrays(), ARRAYS, strict=True):
        assert got.dtype == array.dtype
        assert np.array_equal(got, array.ravel(), equal_nan=array.dtype == np.float32)


def test_what_is_under_way_is_not_written_again(device):
    transfers = Transfers(device)
    for number in range(3):
        transfers.send(np.full(4, number))
    assert len(device.pieces) == 3
    assert [int(piece.view(torch.int64)[0]) for piece in device.pieces] == [0, 1, 2]
    device.finish(2)
    for number in (3, 4, 5):
        transfers.send(np.full(4, number))
    assert [int(piece.view(torch.int64)[0]) for piece in device.pieces] == [3, 4, 2, 5]


def test_what_was_fetched_stays_until_it_is_read(device):
    transfers = Transfers(device)
    first = transfers.fetch(torch.full((3,), 1))
    device.finish()
    second = transfers.fetch(torch.full((3,), 2))
    transfers.send(np.full(4, 3))
    (got,) = first.arrays()
    transfers.fetch(torch.full((3,), 4))
    assert len(device.pieces) == 3
    assert got.tolist() == [1, 1, 1]
    assert second.arrays()[0].tolist() == [2, 2, 2]


def test_a_piece_is_large_enough(device):
    transfers = Transfers(device)
    for size in (10, 100_000, 10, 100_000, 50_000):
        (sent,) = transfers.send(np.arange(size))
        assert sent.tolist() == list(range(size))
        device.finish()
    assert len(device.pieces) == 2


def test_nothing_is_sent_and_fetched(device):
    transfers = Transfers(device)
    assert transfers.send(np.zeros(0, np.int64))[0].shape == (0,)
    assert transfers.fetch(torch.zeros(0, dtype=torch.int64)).arrays()[0].shape == (0,)


def test_what_is_sent_ahead_lies_where_it_was_told_to(device):
    target = torch.zeros(64, dtype=torch.uint8)
    transfers = Transfers(device)
    sent = transfers.send_ahead(target, np.arange(5, dtype=np.int64))
    assert sent.tolist() == [0, 1, 2, 3, 4]
    assert sent.data_ptr() == target.data_ptr()
    transfers.send_ahead(torch.zeros_like(target), np.arange(5, 10, dtype=np.int64))
    assert len(device.pieces) == 2, "the first piece is still being copied"
    assert sent.tolist() == [0, 1, 2, 3, 4]
