"""Typed columns in a record, which all encoders and decoders share.

This module owns how a column becomes bytes and how columns are read from a record. It must not
know any message.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shmllm.errors import ProtocolMismatchError

Parts = tuple[bytes, ...]
TypeCode = Literal["i", "q", "H", "B", "I", "d"]
_ITEM_BYTES = {"i": 4, "q": 8, "H": 2, "B": 1, "I": 4, "d": 8}


def column(typecode: TypeCode, values: Sequence[Any]) -> bytes:
    """Pack `values` as little-endian numbers."""
    # struct.pack is two to four times as fast as array(typecode, values).
    return pack(f"<{len(values)}{typecode}", *values)


class Sections:
    """Reads typed columns from a record, beginning at `offset` and ending at the record's end."""

    __slots__ = ("offset", "record")

    def __init__(self, record: memoryview | bytes, offset: int) -> None:
        self.record = record
        self.offset = offset

    def take(self, typecode: TypeCode, count: int) -> list[Any]:
        if not count:
            return []
        column = self.take_bytes(count * _ITEM_BYTES[typecode])
        return memoryview(column).cast(typecode).tolist()

    def take_array(self, dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
        """Read a column as an array; cheaper than a list if few callers look at single items."""
        return np.frombuffer(self.take_bytes(count * dtype().itemsize), dtype)

    def take_bytes(self, length: int) -> bytes:
        end = self.offset + length
        if end > len(self.record):
            raise ProtocolMismatchError(
                f"a record of {len(self.record)} bytes announces a section that ends at byte {end}"
            )
        column = bytes(self.record[self.offset : end])
        self.offset = end
        return column

    def text(self, length: int) -> str:
        return self.take_bytes(length).decode()

    def rest(self) -> str:
        return self.text(len(self.record) - self.offset)

    def end(self) -> None:
        if self.offset != len(self.record):
            raise ProtocolMismatchError(
                f"{len(self.record) - self.offset} bytes follow a record's last section"
            )
