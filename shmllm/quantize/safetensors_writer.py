"""Writes a safetensors file, one tensor after the other.

The package `safetensors` writes a file only from all of its tensors in memory. The form is that of
its documentation: the length of the header as 8 bytes, the header as JSON that spaces may follow,
then the tensors. Room for the header is left at the beginning, and filled at the end.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_ENTRY_BYTES = 200
"""More than the header has for a tensor, without its name."""
_LENGTH_BYTES = 8


class SafetensorsWriter:
    """A file that is written inside of a `with` block.

    Args:
        path: the file.
        most_tensors: an upper bound of the number of tensors.
        longest_name: an upper bound of the length of their names.
    """

    def __init__(self, path: Path, most_tensors: int, longest_name: int) -> None:
        self._path = path
        self._room = -(-(most_tensors + 1) * (longest_name + _ENTRY_BYTES) // 8) * 8
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0

    def __enter__(self) -> Self:
        self._file = open(self._path, "wb")
        self._file.seek(_LENGTH_BYTES + self._room)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                header = json.dumps(self._header, separators=(",", ":")).encode()
                assert len(header) <= self._room
                self._file.seek(0)
                self._file.write(self._room.to_bytes(_LENGTH_BYTES, "little"))
                self._file.write(header.ljust(self._room))

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor.

        Raises:
            OSError: the disk is full.
        """
        begin, self._end = self._end, self._end + tensor.nbytes
        self._header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, self._end],
        }
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
