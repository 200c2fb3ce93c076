"""Small arrays on their way to the device and back.

Owns the pinned memory that they go through, and sees to it that none is used again while a copy
may still read or write it. Copies are asynchronous and in the order of the device's stream. Knows
nothing of what the numbers mean.
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
"""Of each array: Triton compiles a kernel once more for addresses that are less aligned."""
SMALLEST_PIECE = 2**14


class _Piece:
    """Pinned memory. Free once the copy that used it is done and, where the host is to read what
    it brought, that is read."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        self.tensor = device.pinned((num_bytes,), torch.uint8)
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()
        self.copied = device.event()
        self.is_held = False

    @property
    def is_free(self) -> bool:
        return not self.is_held and self.copied.is_done()

    def write(self, begin: int, array: Array) -> None:
        """Put an array there, `begin` bytes behind the first."""
        place = self.array[begin : begin + array.nbytes].view(array.dtype)
        place.reshape(array.shape)[...] = array


class Fetched:
    """Arrays on their way to the host."""

    def __init__(self, piece: _Piece, places: list[tuple[int, int, Any]]) -> None:
        self._piece = piece
        self._places = places

    def arrays(self) -> list[Array]:
        """Waits for them. To be called once: the memory is used again then."""
        piece = self._piece
        piece.copied.wait()
        arrays = [piece.array[begin:end].view(dtype).copy() for begin, end, dtype in self._places]
        piece.is_held = False
        return arrays


class Transfers:
    """
    Args:
        device: where they go to and come from.

    Attributes:
        torch_device: the same for torch's factories.
    """

    def __init__(self, device: Device) -> None:
        self.torch_device = device.torch_device
        self._device = device
        self._pieces: list[_Piece] = []

    def send(self, *arrays: Array) -> list[Tensor]:
        """These arrays as tensors on the device, by one copy. The arrays may be changed at once."""
        ends = _ends([array.nbytes for array in arrays])
        begins = [0, *ends[:-1]]
        piece = self._take(ends[-1])
        for begin, array in zip(begins, arrays, strict=True):
            piece.write(begin, array)
        sent = torch.empty(ends[-1], dtype=torch.uint8, device=self.torch_device)
        sent.copy_(piece.tensor[: ends[-1]], non_blocking=True)
        piece.copied.record()
        return [
            sent[begin : begin + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def send_ahead(self, target: Tensor, array: Array) -> Tensor:
        """This array, as `send` has it, in the first bytes of `target`; see `Device.copy_ahead`.

        Args:
            target: (bytes,) uint8 on the device.
            array: of no more bytes.
        """
        piece = self._take(array.nbytes)
        piece.write(0, array)
        sent = target[: array.nbytes]
        self._device.copy_ahead(sent, piece.tensor[: array.nbytes])
        piece.copied.record()
        return sent.view(_TYPES[array.dtype]).view(array.shape)

    def fetch(self, *tensors: Tensor) -> Fetched:
        """These contiguous tensors as flat arrays on the host, later."""
        ends = _ends([tensor.nbytes for tensor in tensors])
        begins = [0, *ends[:-1]]
        piece = self._take(ends[-1])
        places = []
        for begin, tensor in zip(begins, tensors, strict=True):
            end = begin + tensor.nbytes
            target = piece.tensor[begin:end].view(tensor.dtype)
            target.copy_(tensor.view(-1), non_blocking=True)
            places.append((begin, end, _DTYPES[tensor.dtype]))
        piece.copied.record()
        piece.is_held = True
        return Fetched(piece, places)

    def _take(self, num_bytes: int) -> _Piece:
        for piece in self._pieces:
            if len(piece.array) >= num_bytes and piece.is_free:
                return piece
        size = 1 << max(num_bytes, SMALLEST_PIECE).bit_length()
        self._pieces.append(_Piece(size, self._device))
        return self._pieces[-1]


_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_DTYPES = {kind: dtype for dtype, kind in _TYPES.items()}


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where arrays of these sizes end, one behind the other, each aligned."""
    ends, end = [], 0
    for size in sizes:
        end += -(-size // ALIGNMENT) * ALIGNMENT
        ends.append(end)
    return ends
