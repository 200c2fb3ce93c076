"""Several tensors in one tensor slot, one after the other.

This module owns their layout in the slot. It must not know the purpose of the tensors, nor how a
`PackedRef` is sent. They share one slot because a model has more tensors than slots exist.
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
    """One tensor of a slot.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: the shape in elements.
        offset: the byte offset in the slot's payload.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].numpy.itemsize


class PackedRef(NamedTuple):
    """A reference to all tensors in one slot; it is sent in the form that `to_json` returns."""

    slot: SlotRef
    tensors: tuple[PackedTensor, ...]

    def to_json(self) -> list[Any]:
        return [list(self.slot), [list(tensor) for tensor in self.tensors]]

    @classmethod
    def from_json(cls, value: Any) -> PackedRef:
        """Decode and check the value that `to_json` returned.

        Raises:
            ProtocolMismatchError: the value has another form, or its numbers contradict each
                other.
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
    # numpy limits the product of the nonzero dimensions, also for empty arrays.
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
    """Copy tensors into one slot and publish it.

    Args:
        slots: the writer of the slots.
        sources: numpy arrays or torch tensors, as for `TensorWriter.try_put`.

    Returns:
        The reference for the reader; None if the reader holds all slots of a suitable size.

    Raises:
        TypeError, ValueError, MessageTooLargeError, NoSpaceError: as for `TensorWriter.try_put`.
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
    """The tensors as arrays over the slot's memory, without a copy.

    The end of the `with` block releases the slot. After that, the caller must not use the arrays
    or anything that shares their memory. A dtype that numpy lacks appears as unsigned integers.

    Raises:
        ProtocolMismatchError: `ref` names a slot that is not published.
    """
    memory = slots.writable_view(ref.slot)
    try:
        yield [_array(memory, tensor) for tensor in ref.tensors]
    finally:
        slots.release(ref.slot)


def arrays_in(slots: SlotReader, ref: PackedRef) -> list[NDArray[Any]]:
    """As `view_all`, but the caller releases the slot."""
    memory = slots.writable_view(ref.slot)
    return [_array(memory, tensor) for tensor in ref.tensors]


def _array(memory: memoryview, tensor: PackedTensor) -> NDArray[Any]:
    part = memory[tensor.offset : tensor.offset + tensor.nbytes]
    return np.frombuffer(part, DTYPES[tensor.dtype].numpy).reshape(tensor.shape)


def as_torch(array: NDArray[Any], dtype: str) -> Any:
    """An array from `view_all` as a torch tensor of the sender's dtype, without a copy.

    Args:
        array: an array from `view_all`.
        dtype: its `PackedTensor.dtype`.
    """
    import torch

    return torch.from_numpy(array.reshape(-1)).view(getattr(torch, dtype)).reshape(array.shape)
