"""References to tensors in slots, and the table of supported dtypes.

This module encodes, decodes and checks a tensor's dtype, shape and slot. It must not know how
bytes get into a slot or out of it. A decoded reference is consistent in itself; the slot's reader
checks whether the slot is published and large enough.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.slots import SlotRef

MAX_DIMENSIONS = 8
ALIGNMENT_BYTES = 64
_REF = struct.Struct(f"<IHBxQQ{MAX_DIMENSIONS}Q")
REF_BYTES = _REF.size
_MAX_BYTES = 2**63 - 1


class TensorDtype(NamedTuple):
    """One supported dtype.

    Attributes:
        code: the number in an encoded reference; never reused for another dtype.
        numpy: the numpy dtype for arrays of this dtype. If numpy lacks the dtype, this is an
            unsigned integer of the same size.
        is_pattern: whether numpy lacks the dtype.
    """

    code: int
    numpy: np.dtype[Any]
    is_pattern: bool


def _dtypes() -> dict[str, TensorDtype]:
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64"
    own = [*names.split(), "complex64", "complex128"]
    patterns = {
        "bfloat16": "u2",
        "complex32": "u4",
        "float8_e4m3fn": "u1",
        "float8_e5m2": "u1",
        "float8_e4m3fnuz": "u1",
        "float8_e5m2fnuz": "u1",
        "float8_e8m0fnu": "u1",
        "float4_e2m1fn_x2": "u1",
    }
    table = {name: TensorDtype(code, np.dtype(name), False) for code, name in enumerate(own, 1)}
    for code, (name, pattern) in enumerate(patterns.items(), 33):
        table[name] = TensorDtype(code, np.dtype(pattern), True)
    return table


DTYPES = _dtypes()
"""The supported dtypes, by the name that numpy, torch and ml_dtypes use."""
_NAMES = {dtype.code: name for name, dtype in DTYPES.items()}


class TensorRef(NamedTuple):
    """A reference to a tensor in a slot, small enough for a record in a ring.

    Attributes:
        slot: the place of the bytes, which are row-major and contiguous.
        dtype: a key of `DTYPES`.
        shape: the shape in elements; () for a scalar.
    """

    slot: SlotRef
    dtype: str
    shape: tuple[int, ...]

    def encode(self) -> bytes:
        """Encode the reference in `REF_BYTES` bytes: slot u32, dtype u16, number of dimensions
        u8, zero u8, offset u64, bytes u64, and 8 dimensions u64 each, unused ones zero."""
        index, offset, nbytes = self.slot
        dimensions = (*self.shape, *[0] * (MAX_DIMENSIONS - len(self.shape)))
        code = DTYPES[self.dtype].code
        return _REF.pack(index, code, len(self.shape), offset, nbytes, *dimensions)

    @classmethod
    def decode(cls, record: bytes | memoryview) -> TensorRef:
        """Decode and check the bytes that `encode` returned.

        Raises:
            ProtocolMismatchError: the bytes are no reference, or contradict each other.
        """
        if len(record) != _REF.size:
            raise ProtocolMismatchError(
                f"a tensor reference has {_REF.size} bytes, got {len(record)}"
            )
        index, code, num_dimensions, offset, nbytes, *dimensions = _REF.unpack(record)
        name = _NAMES.get(code)
        if name is None or num_dimensions > MAX_DIMENSIONS or any(dimensions[num_dimensions:]):
            raise ProtocolMismatchError(
                f"no tensor reference: dtype code {code}, {num_dimensions} dimensions {dimensions}"
            )
        ref = cls(SlotRef(index, offset, nbytes), name, tuple(dimensions[:num_dimensions]))
        ref.check()
        return ref

    def check(self) -> None:
        """Raise ProtocolMismatchError unless shape, dtype, size and offset fit together."""
        itemsize = DTYPES[self.dtype].numpy.itemsize
        # numpy limits the product of the nonzero dimensions, also for empty arrays.
        largest = math.prod(filter(None, self.shape)) * itemsize
        expected = math.prod(self.shape) * itemsize
        misplaced = self.slot.offset % ALIGNMENT_BYTES
        if expected != self.slot.nbytes or largest > _MAX_BYTES or misplaced:
            raise ProtocolMismatchError(
                f"{self.dtype} of shape {self.shape} takes {expected} bytes, but the reference has "
                f"{self.slot.nbytes} at offset {self.slot.offset} (which must be a multiple of "
                f"{ALIGNMENT_BYTES})"
            )
