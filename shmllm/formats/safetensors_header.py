"""Reads the headers of safetensors files: which tensors there are, without their elements."""

from __future__ import annotations

import json
import os
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from shmllm.errors import EngineStartError
from shmllm.formats.text_files import one_line, open_regular

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_DAMAGE = (
    OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError
)  # fmt: skip
"""What the header of a damaged safetensors file causes."""
_NIBBLES = {"I32": 8, "U8": 2}
"""The elements of 4 bits in a number, by the dtypes that quantized checkpoints have them in. Others
are counted as if they were 4 bits, and scales as weights."""


class Header(NamedTuple):
    """What a file contains.

    names: the names of its tensors.
    num_elements: the number of elements of all of them.
    """

    names: frozenset[str]
    num_elements: int


def read_header(path: Path) -> Header:
    """Returns what a file contains.

    Raises:
        EngineStartError: it is damaged.
    """
    try:
        with open(open_regular(path), "rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(_MOST_HEADER_BYTES, os.fstat(file.fileno()).st_size):
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(file.read(length))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        counts = (
            _elements(each["shape"]) * _NIBBLES.get(each["dtype"], 1) for each in tensors.values()
        )
        return Header(frozenset(tensors), sum(counts))
    except _DAMAGE as error:
        raise EngineStartError(
            f"{path} is damaged or not a safetensors file ({one_line(error)}); copy or download it "
            "again"
        ) from None


def _elements(shape: list[Any]) -> int:
    """The number of elements of a shape from a file; ValueError if it cannot be one."""
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"a tensor has the shape {str(shape)[:60]}")
    return prod(shape)
