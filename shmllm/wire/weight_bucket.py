"""Buckets of weights: pieces of tensors side by side in one block of memory.

This module cuts tensors into pieces that fill buckets, and encodes and decodes the list of a
bucket's pieces. A bucket in host memory is a numpy array, and one on a GPU is a torch tensor, which
this module uses without importing torch. It must not know where the memory comes from or how a
bucket is transmitted.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from shmllm.errors import ProtocolMismatchError, RequestError
from shmllm.ipc.device_memory import GRANULARITY_BYTES
from shmllm.ipc.tensor_ref import ALIGNMENT_BYTES, DTYPES, MAX_DIMENSIONS
from shmllm.ipc.tensors import as_array
from shmllm.wire.values import is_torch_tensor

BUCKET_BYTES = 4 * 2**20
"""The size of a bucket: that of a medium slot. The eight medium slots keep their pages, and a
bucket of this size is still in the processor's cache when the engine copies it."""
DEVICE_BUCKET_BYTES = 256 * 2**20
"""The largest size of a bucket on a GPU. 16 GB take 60 of them: at 0.7 ms for the call and the
changes between the two processes on the GPU, 42 ms beside 31 ms of copies (`models.weight_staging`
has the sum). Twice the size would save 20 ms and take memory from the trainer."""


def device_bucket_bytes(num_bytes: int) -> int:
    """The size of a bucket on a GPU, for tensors of about `num_bytes` bytes in all."""
    size = -(-num_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
    return min(max(size, GRANULARITY_BYTES), DEVICE_BUCKET_BYTES)


class Piece(NamedTuple):
    """A range of elements of a tensor.

    Attributes:
        name: the name of the tensor.
        dtype: the tensor's dtype, a key of `DTYPES`.
        shape: the shape of the whole tensor.
        begin: the index of the first element in the flattened tensor.
        length: the number of elements.
        offset: the offset of the first element in the bucket, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    length: int
    offset: int


class Source:
    """A tensor to send.

    Args:
        name: the tensor's name in the checkpoint.
        tensor: a numpy array, or a torch tensor on any device.
        on_device: send a torch tensor from the device where it is, instead of from host memory.

    Attributes:
        flat: the flattened tensor: a numpy array in host memory, or a torch tensor on its device.
        num_sent: the number of elements that buckets hold already.

    Raises:
        RequestError: `name` is not a string, or `tensor` is not a tensor of a known dtype.
    """

    def __init__(self, name: str, tensor: Any, on_device: bool = False) -> None:
        if not isinstance(name, str) or not hasattr(type(tensor), "nbytes"):
            raise RequestError(
                "weights are (name, tensor) pairs, got "
                f"({type(name).__name__}, {type(tensor).__name__})"
            )
        try:
            array, self.dtype = _on_device(tensor) if on_device else _on_host(tensor)
        except (TypeError, ValueError) as problem:
            raise RequestError(f"{name}: {problem}") from None
        self.name = name
        self.shape = tuple(array.shape)
        self.flat = array.reshape(-1)
        self.num_sent = 0

    @property
    def is_sent(self) -> bool:
        return self.num_sent == len(self.flat)


class Bucket:
    """
    Args:
        memory: the bytes to fill; their number is a multiple of `ALIGNMENT_BYTES`. A torch tensor
            (bytes,) uint8 takes sources on its device, other memory takes sources in host memory.

    Attributes:
        pieces: the pieces so far.
    """

    def __init__(self, memory: Any) -> None:
        self._on_device = is_torch_tensor(memory)
        self._bytes = memory if self._on_device else np.frombuffer(memory, np.uint8)
        self._used = 0
        self.pieces: list[Piece] = []

    @property
    def is_full(self) -> bool:
        return self._used >= len(self._bytes)

    def fill(self, source: Source) -> None:
        """Copy unsent elements of a tensor, as many as the bucket has room for. On a device, this
        only launches the copy."""
        begin, itemsize = source.num_sent, source.flat.itemsize
        part = source.flat[begin : begin + (len(self._bytes) - self._used) // itemsize]
        end = self._used + part.nbytes
        target = self._bytes[self._used : end].view(part.dtype)
        if self._on_device:
            target.copy_(part)
        else:
            np.copyto(target, part)
        self.pieces.append(
            Piece(source.name, source.dtype, source.shape, begin, len(part), self._used)
        )
        source.num_sent += len(part)
        self._used = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def to_json(self) -> str:
        """The list of the pieces, as JSON text."""
        return json.dumps(self.pieces)


def pieces_of(text: str, nbytes: int) -> list[Piece]:
    """Decode the list of the pieces in a bucket of `nbytes` bytes.

    Raises:
        ProtocolMismatchError: the text is not a valid list of pieces.
    """
    try:
        return as_pieces(json.loads(text), nbytes)
    except (ValueError, RecursionError) as problem:
        raise ProtocolMismatchError(f"not a valid bucket of weights: {problem}") from problem


def as_pieces(items: Any, nbytes: int) -> list[Piece]:
    """Check the list of the pieces in a bucket of `nbytes` bytes, which JSON has made lists of.

    Raises:
        ProtocolMismatchError: this is not a valid list of pieces.
    """
    try:
        pieces = [
            Piece(_text(name), dtype, tuple(map(_natural, shape)), *map(_natural, numbers))
            for name, dtype, shape, *numbers in items
        ]
        for piece in pieces:
            end = piece.offset + piece.length * DTYPES[piece.dtype].numpy.itemsize
            if end > nbytes or piece.offset % ALIGNMENT_BYTES or len(piece.shape) > MAX_DIMENSIONS:
                raise ValueError(f"{piece} does not lie in {nbytes} bytes")
    except (TypeError, ValueError, KeyError) as problem:
        raise ProtocolMismatchError(f"not a valid bucket of weights: {problem}") from problem
    return pieces


def _on_host(tensor: Any) -> tuple[Any, str]:
    """(the tensor as a numpy array in host memory, the name of its dtype in `DTYPES`)."""
    has_values = is_torch_tensor(tensor) and not tensor.is_meta
    return as_array(tensor.cpu() if has_values else tensor)


def _on_device(tensor: Any) -> tuple[Any, str]:
    """(the torch tensor where it is, without its history, the name of its dtype in `DTYPES`)."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or str(tensor.layout) != "torch.strided":
        raise TypeError(f"a {tensor.layout} tensor of {name} cannot be sent")
    if tensor.ndim > MAX_DIMENSIONS:
        raise ValueError(f"{tensor.ndim} dimensions; at most {MAX_DIMENSIONS} can be sent")
    return tensor.detach().resolve_conj().resolve_neg(), name


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a name")
    return value
