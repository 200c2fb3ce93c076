"""ResultPieces: puts the pieces of a result together that is larger than a row."""

from __future__ import annotations

from shmllm.outputs.columns import Piece


class ResultPieces:
    """
    Attributes:
        data: the bytes so far, which follow each other without a gap.
    """

    __slots__ = ("_begin", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._begin = 0

    def add(self, piece: Piece) -> None:
        """Add a piece. One that does not begin at the end of those before takes the place of what
        follows: the request was recomputed."""
        if not self.data or piece.offset < self._begin:
            self.data.clear()
            self._begin = piece.offset
        del self.data[piece.offset - self._begin :]
        self.data += piece.data
