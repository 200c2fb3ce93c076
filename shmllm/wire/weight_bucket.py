"""Weights on their way: pieces of tensors side by side in one block of memory.

Owns how tensors are cut to fill buckets, and how the list of a bucket's pieces is written and
read. Must not know where the memory comes from, nor how a bucket travels.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from shmllm.errors import ProtocolMismatchError, RequestError
from shmllm.ipc.tensor_ref import ALIGNMENT_BYTES, DTYPES, MAX_DIMENSIONS
from shmllm.ipc.tensors import as_array
from shmllm.wire.values import is_torch_tensor

BUCKET_BYTES = 4 * 2**20
"""What a slot of middle size holds: eight of them keep their pages, and the copy out of one
finds its bytes still in the processor's cache."""


class Piece(NamedTuple):
    """Some elements of a tensor.

    Attributes:
        name: of the tensor.
        dtype: a key of `DTYPES`.
        shape: of the whole tensor.
        begin: first element, counted in the flattened tensor.
        length: how many.
        offset: of the first one in the bucket, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    length: int
    offset: int


class Source:
    """A tensor that is being sent.

    Args:
        name: as in the checkpoint.
        tensor: numpy array or torch tensor, on any device.

    Raises:
        RequestError: it is none.
    """

    def __init__(self, name: str, tensor: Any) -> None:
        if not isinstance(name, str) or not hasattr(tensor, "nbytes"):
            raise RequestError(
                "weights are (name, tensor) pairs, got "
                f"({type(name).__name__}, {type(tensor).__name__})"
            )
        try:
            array, self.dtype = as_array(tensor.cpu() if is_torch_tensor(tensor) else tensor)
        except (TypeError, ValueError) as problem:
            raise RequestError(f"{name}: {problem}") from None
        self.name = name
        self.shape = array.shape
        self.flat = array.reshape(-1)
        self.num_sent = 0

    @property
    def is_sent(self) -> bool:
        return self.num_sent == len(self.flat)


class Bucket:
    """
    Args:
        memory: to fill; a multiple of `ALIGNMENT_BYTES`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)
        self._used = 0
        self._pieces: list[Piece] = []

    @property
    def is_full(self) -> bool:
        return self._used >= len(self._bytes)

    def fill(self, source: Source) -> None:
        """Copy of what was not sent yet as much as there is room for."""
        begin, itemsize = source.num_sent, source.flat.itemsize
        part = source.flat[begin : begin + (len(self._bytes) - self._used) // itemsize]
        end = self._used + part.nbytes
        np.copyto(self._bytes[self._used : end].view(part.dtype), part)
        self._pieces.append(
            Piece(source.name, source.dtype, source.shape, begin, len(part), self._used)
        )
        source.num_sent += len(part)
        self._used = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def to_json(self) -> str:
        """The list of its pieces."""
        return json.dumps(self._pieces)


def pieces_of(text: str, nbytes: int) -> list[Piece]:
    """The pieces in a bucket of this size.

    Raises:
        ProtocolMismatchError: the text is no such list, or contradicts itself.
    """
    try:
        pieces = [
            Piece(_text(name), dtype, tuple(map(_natural, shape)), *map(_natural, numbers))
            for name, dtype, shape, *numbers in json.loads(text)
        ]
        for piece in pieces:
            end = piece.offset + piece.length * DTYPES[piece.dtype].numpy.itemsize
            if end > nbytes or piece.offset % ALIGNMENT_BYTES or len(piece.shape) > MAX_DIMENSIONS:
                raise ValueError(f"{piece} does not lie in {nbytes} bytes")
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise ProtocolMismatchError(f"no bucket of weights: {problem}") from problem
    return pieces


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no size")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return value
