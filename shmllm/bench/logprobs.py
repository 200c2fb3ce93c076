"""The benchmark's encoding of OUTPUTS with logprob columns, in the style of `shmllm.wire`.

A record is a header, the OUTPUTS record as the codec writes it, and the columns as raw arrays. The
receiver makes array views over one copy of the columns.

    LOGPROBS  LOGPROBS_HEADER | OUTPUTS record, zeros up to a multiple of 4,
              token ids i32[rows, top], logprobs f32[rows, top], ranks i32[rows]
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.ring import BytesLike
from shmllm.outputs.columns import OutputColumns
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind

# rows, top, bytes of the OUTPUTS record
LOGPROBS_HEADER = Struct("<III4x")
ITEM_BYTES = 4


class LogprobColumns(NamedTuple):
    """The most likely tokens of each row.

    Attributes:
        token_ids: int32 [rows, top].
        logprobs: float32 [rows, top].
        ranks: int32 [rows], the rank of each row's sampled token.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]


def encode(outputs: OutputColumns, columns: LogprobColumns) -> tuple[BytesLike, ...]:
    """Encodes one record and returns its parts."""
    parts = codec.encode_outputs(outputs)
    num_bytes = sum(map(len, parts))
    rows, top = columns.token_ids.shape
    padding = b"\0" * (-num_bytes % ITEM_BYTES)
    return (LOGPROBS_HEADER.pack(rows, top, num_bytes), *parts, padding, *columns)


def decode(record: memoryview) -> tuple[OutputColumns, LogprobColumns]:
    """Decodes a record. The result holds copies and does not refer to `record`.

    Raises:
        ProtocolMismatchError: the bytes are not a record of this format.
    """
    if len(record) < LOGPROBS_HEADER.size:
        raise ProtocolMismatchError(f"LOGPROBS has a header of {LOGPROBS_HEADER.size} bytes")
    rows, top, num_bytes = LOGPROBS_HEADER.unpack_from(record)
    end = LOGPROBS_HEADER.size + num_bytes
    begin = end + -num_bytes % ITEM_BYTES
    num_items = rows * top
    if len(record) != begin + ITEM_BYTES * (2 * num_items + rows):
        raise ProtocolMismatchError("the columns of LOGPROBS do not end where the record does")
    outputs = codec.decode(RecordKind.OUTPUTS, record[LOGPROBS_HEADER.size : end])
    assert isinstance(outputs, OutputColumns)
    items = np.frombuffer(bytes(record[begin:]), np.int32)
    return outputs, LogprobColumns(
        items[:num_items].reshape(rows, top),
        items[num_items : 2 * num_items].view(np.float32).reshape(rows, top),
        items[2 * num_items :],
    )
