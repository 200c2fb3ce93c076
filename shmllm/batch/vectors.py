"""Vectors in journals, which are written and read faster than JSON's numbers, and arrays of them.

A vector in a journal is the base64 of its float32 numbers, the lowest byte first.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmllm.batch.journal import pieces_of, replacing
from shmllm.batch.rows import JsonObject

if TYPE_CHECKING:
    from shmllm.outputs.pooling import Vector

NUMBER_BYTES = 4
_NOT_A_NUMBER = b"\x00\x00\xc0\x7f"


def encoded(vector: Vector) -> str:
    """A vector of shape [width] as text."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


def decoded(text: str) -> bytes:
    """The numbers of an encoded vector."""
    return base64.b64decode(text)


def array_of(text: str) -> Vector:
    """An encoded vector as an array of shape [width]."""
    import numpy as np

    return np.frombuffer(decoded(text), "<f4")


def width_of(value: Any) -> int:
    """How many numbers a vector has, which is encoded or a list."""
    if not isinstance(value, str):
        return len(value)
    num_bytes = len(value) // 4 * 3 - value.endswith("=") - value.endswith("==")
    return num_bytes // NUMBER_BYTES


def width_in(journal: str, field: str) -> int:
    """The width of the vectors in a journal; 0 if it has none."""
    records = (record for piece in pieces_of(journal) for record in piece)
    return next((width_of(record[field]) for record in records if field in record), 0)


def write_npy(
    journal: str,
    path: str,
    field: str,
    on_failure: Callable[[JsonObject], None] = lambda record: None,
) -> None:
    """Converts the vectors of a journal to a .npy file, which appears when it is complete.

    Its array is float32 of shape [records, width], in the order of the journal. The row of a
    record without a vector consists of NaN.

    Args:
        journal: the file of JSON lines.
        path: the .npy file to write.
        field: the field of the records that holds the vector.
        on_failure: is called with each record without a vector.
    """
    from numpy.lib import format as npy

    width = width_in(journal, field)
    shape = (sum(map(len, pieces_of(journal))), width)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with replacing(path) as part, open(part, "wb") as target:
        npy.write_array_header_1_0(target, header)
        for records in pieces_of(journal):
            for record in records:
                if field in record:
                    target.write(decoded(record[field]))
                else:
                    target.write(_NOT_A_NUMBER * width)
                    on_failure(record)
