"""Several tensors in one slot, one behind the other.

Owns how they are laid out and found again; must not know what they are for, nor how a
`PackedRef` travels. One slot for all, because a model has more tensors than there are slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.slots import SlotReader, SlotRef, SlotWriter
from shmllm.ipc.tensor_ref import ALIGNMENT_BYTES, DTYPES, MAX_DIMENSIONS
from shmllm.ipc.tensors import as_array


class PackedTensor(NamedTuple):
    """One of them: a key of `DTYPES`, its shape, and where it begins in the slot."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].numpy.itemsize


class PackedRef(NamedTuple):
    """All of them; `to_json` makes it travel."""

    slot: SlotRef
    tensors: tuple[PackedTensor, ...]

    def to_json(self) -> list[Any]:
        return [list(self.slot), [list(tensor) for tensor in self.tensors]]

    @classmethod
    def from_json(cls, value: Any) -> PackedRef:
        """
        Raises:
            ProtocolMismatchError: it is none, or contradicts itself.
        """
        try:
            slot, tensors = value
            index, offset, nbytes = map(_natural, slot)
            packed = [
                PackedTensor(dtype, tuple(map(_natural, shape)), _natural(begin))
                for dtype, shape, begin in tensors
            ]
            for tensor in packed:
                _check(tensor, nbytes)
        except (TypeError, ValueError, KeyError) as problem:
            raise ProtocolMismatchError(f"no packed tensors: {problem}") from problem
        return cls(SlotRef(index, offset, nbytes), tuple(packed))


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no size")
    return value


def _check(tensor: PackedTensor, nbytes: int) -> None:
    # numpy multiplies the dimensions of an empty array too, without the zeros.
    largest = math.prod(filter(None, tensor.shape)) * DTYPES[tensor.dtype].numpy.itemsize
    fits = tensor.offset + tensor.nbytes <= nbytes and largest < 2**63
    if not fits or tensor.offset % ALIGNMENT_BYTES or len(tensor.shape) > MAX_DIMENSIONS:
        raise ValueError(f"{tensor} does not lie in {nbytes} bytes")


def _plan(arrays: list[tuple[NDArray[Any], str]]) -> tuple[list[PackedTensor], int]:
    tensors, offset = [], 0
    for array, name in arrays:
        tensors.append(PackedTensor(name, array.shape, offset))
        offset += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tensors, offset


def try_put_all(slots: SlotWriter, sources: Sequence[Any]) -> PackedRef | None:
    """Copy tensors into one slot and lend it to the reader; None while all are lent.

    Args:
        slots: to write into.
        sources: as for `TensorWriter.try_put`, and with its exceptions.
    """
    arrays = [as_array(source) for source in sources]
    tensors, size = _plan(arrays)
    slot = slots.claim(size)
    if slot is None:
        return None
    try:
        for (array, name), tensor in zip(arrays, tensors, strict=True):
            target: NDArray[Any] = np.ndarray(
                array.shape, DTYPES[name].numpy, slot.buffer, tensor.offset
            )
            np.copyto(target, array, casting="equiv")
            del target
    except BaseException:
        slot.abort()
        raise
    return PackedRef(slot.publish(), tuple(tensors))


@contextmanager
def view_all(slots: SlotReader, ref: PackedRef) -> Iterator[list[NDArray[Any]]]:
    """The tensors in place, as arrays; dtypes that numpy lacks come as unsigned integers.

    The slot goes back at the end, and what was made of the arrays without a copy must not be
    used any more.

    Raises:
        ProtocolMismatchError: its slot is not lent.
    """
    memory = slots.borrow(ref.slot)
    try:
        yield [_array(memory, tensor) for tensor in ref.tensors]
    finally:
        slots.release(ref.slot)


def _array(memory: memoryview, tensor: PackedTensor) -> NDArray[Any]:
    part = memory[tensor.offset : tensor.offset + tensor.nbytes]
    return np.frombuffer(part, DTYPES[tensor.dtype].numpy).reshape(tensor.shape)


def as_torch(array: NDArray[Any], dtype: str) -> Any:
    """An array of `view_all` as the torch tensor that was sent, without a copy."""
    import torch

    return torch.from_numpy(array.reshape(-1)).view(getattr(torch, dtype)).reshape(array.shape)
