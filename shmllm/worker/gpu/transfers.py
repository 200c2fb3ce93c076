"""Asynchronous copies of small arrays to the device and back, in the order of its stream.

This module owns the pinned buffers that the copies go through, and reuses a buffer only when no
copy may still read or write it. It must not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.worker.gpu.device import Device

Array = npt.NDArray[Any]

ALIGNMENT = 16
"""The alignment of each array, in bytes: Triton compiles another variant of a kernel for addresses
that are less aligned."""
SMALLEST_BUFFER_BYTES = 2**14


class _PinnedBuffer:
    """A pinned buffer. It is free when the copy that used it is done and, if the copy went to the
    host, the host has read the result."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        self.tensor = device.pinned((num_bytes,), torch.uint8)
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()
        self.copied = device.event()
        self.is_unread = False

    @property
    def is_free(self) -> bool:
        return not self.is_unread and self.copied.is_done()

    def write(self, begin: int, array: Array) -> None:
        """Copy an array into the buffer, at the offset `begin`, in bytes."""
        target = self.array[begin : begin + array.nbytes].view(array.dtype)
        target.reshape(array.shape)[...] = array


class PendingArrays:
    """Arrays that the device copies to the host."""

    def __init__(self, buffer: _PinnedBuffer, ranges: list[tuple[int, int, Any]]) -> None:
        self._buffer = buffer
        self._ranges = ranges

    def arrays(self) -> list[Array]:
        """Wait for the copy, and return the arrays. May be called once: it frees the buffer."""
        buffer = self._buffer
        buffer.copied.wait()
        arrays = [buffer.array[begin:end].view(dtype).copy() for begin, end, dtype in self._ranges]
        buffer.is_unread = False
        return arrays


class Transfers:
    """Copies arrays between the host and a device.

    Args:
        device: the device.

    Attributes:
        torch_device: the device for torch's factory functions.
    """

    def __init__(self, device: Device) -> None:
        self.torch_device = device.torch_device
        self._device = device
        self._buffers: list[_PinnedBuffer] = []

    def send(self, *arrays: Array) -> list[Tensor]:
        """Copy arrays to the device with one copy, and return them as tensors. The caller may
        change the arrays afterwards."""
        ends = _ends([array.nbytes for array in arrays])
        begins = [0, *ends[:-1]]
        buffer = self._free_buffer(ends[-1])
        for begin, array in zip(begins, arrays, strict=True):
            buffer.write(begin, array)
        sent = torch.empty(ends[-1], dtype=torch.uint8, device=self.torch_device)
        sent.copy_(buffer.tensor[: ends[-1]], non_blocking=True)
        buffer.copied.record()
        return [
            sent[begin : begin + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def send_one(self, array: Array) -> Tensor:
        """Copy an array to the device; see `send`."""
        (sent,) = self.send(array)
        return sent

    def send_ahead(self, target: Tensor, array: Array) -> Tensor:
        """Copy an array to the device with `Device.copy_ahead`, and return it as a tensor.

        Args:
            target: (bytes,) uint8 on the device, the memory of the returned tensor.
            array: the array, no larger than `target`.
        """
        buffer = self._free_buffer(array.nbytes)
        buffer.write(0, array)
        sent = target[: array.nbytes]
        self._device.copy_ahead(sent, buffer.tensor[: array.nbytes])
        buffer.copied.record()
        return sent.view(_TYPES[array.dtype]).view(array.shape)

    def fetch(self, *tensors: Tensor) -> PendingArrays:
        """Start to copy contiguous tensors to the host, as flat arrays."""
        ends = _ends([tensor.nbytes for tensor in tensors])
        begins = [0, *ends[:-1]]
        buffer = self._free_buffer(ends[-1])
        ranges = []
        for begin, tensor in zip(begins, tensors, strict=True):
            end = begin + tensor.nbytes
            target = buffer.tensor[begin:end].view(tensor.dtype)
            target.copy_(tensor.view(-1), non_blocking=True)
            ranges.append((begin, end, _DTYPES[tensor.dtype]))
        buffer.copied.record()
        buffer.is_unread = True
        return PendingArrays(buffer, ranges)

    def _free_buffer(self, num_bytes: int) -> _PinnedBuffer:
        for buffer in self._buffers:
            if len(buffer.array) >= num_bytes and buffer.is_free:
                return buffer
        size = 1 << max(num_bytes, SMALLEST_BUFFER_BYTES).bit_length()
        self._buffers.append(_PinnedBuffer(size, self._device))
        return self._buffers[-1]


_TYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_DTYPES = {kind: dtype for dtype, kind in _TYPES.items()}


def _ends(sizes: Sequence[int]) -> list[int]:
    """Return the aligned end offsets of consecutive arrays of these sizes, in bytes."""
    ends, end = [], 0
    for size in sizes:
        end += -(-size // ALIGNMENT) * ALIGNMENT
        ends.append(end)
    return ends
