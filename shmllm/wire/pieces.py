"""EMBEDDINGS, ROUTED_EXPERTS and SAMPLING_MASKS: pieces of results that are larger than a row.

all     rows u32 | numbers i64[], offsets i64[], bytes of each piece u32[], all pieces
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TypeVar

from shmllm.errors import ProtocolMismatchError
from shmllm.outputs.columns import Embeddings, MaskColumns, Piece, PieceColumns, RoutedColumns
from shmllm.wire.messages import RecordKind
from shmllm.wire.sections import Parts, Sections, column

ROWS = Struct("<I")
FLOAT_BYTES = WORD_BYTES = 4
KIND_OF_PIECES = {
    Embeddings: RecordKind.EMBEDDINGS,
    RoutedColumns: RecordKind.ROUTED_EXPERTS,
    MaskColumns: RecordKind.SAMPLING_MASKS,
}
Columns = TypeVar("Columns", bound=PieceColumns)


def encode_pieces(message: PieceColumns) -> Parts:
    return (
        ROWS.pack(len(message.numbers)),
        column("q", message.numbers),
        column("q", [piece.offset for piece in message.pieces]),
        column("I", [len(piece.data) for piece in message.pieces]),
        *(piece.data for piece in message.pieces),
    )


def decode_embeddings(record: memoryview) -> Embeddings:
    return _decode(record, Embeddings, FLOAT_BYTES)


def decode_routed_experts(record: memoryview) -> RoutedColumns:
    return _decode(record, RoutedColumns, 1)


def decode_sampling_masks(record: memoryview) -> MaskColumns:
    return _decode(record, MaskColumns, WORD_BYTES)


def _decode(
    record: memoryview, make: Callable[[list[int], list[Piece]], Columns], item_bytes: int
) -> Columns:
    (rows,) = ROWS.unpack_from(record)
    sections = Sections(record, ROWS.size)
    numbers, offsets = sections.take("q", rows), sections.take("q", rows)
    sizes = sections.take("I", rows)
    if min(offsets, default=0) < 0 or any(each % item_bytes for each in (*offsets, *sizes)):
        raise ProtocolMismatchError("a piece of a result begins or ends inside of a number")
    pieces = [
        Piece(offset, sections.take_bytes(size))
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    sections.end()
    return make(numbers, pieces)
