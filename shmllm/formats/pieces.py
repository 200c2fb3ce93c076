"""Reads files of `sentencepiece`: messages of protocol buffers (`sentencepiece_model.proto`) with
pieces, their scores, how they were found, and how texts are normalised.

This module must not import `tokenizers`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""The types of pieces; llama.cpp's of tokens are the same."""
SPACE = "\u2581"
_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Message = dict[int, list[Any]]
"""The values of a message by the number of the field: integers, or bytes."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What such a file says.

    Attributes:
        texts: the pieces by id.
        scores: theirs.
        kinds: their types.
        is_bpe: whether they are joined by scores.
        has_bytes: whether characters that are no piece become bytes.
        adds_space: whether a space is put in front of texts.
        joins_spaces: whether several spaces become one.
        has_map: whether characters are replaced.
    """

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    is_bpe: bool
    has_bytes: bool
    adds_space: bool
    joins_spaces: bool
    has_map: bool


def read_pieces(content: bytes) -> Pieces:
    """Returns what a file says, by its content.

    Raises:
        ValueError: it is no such file.
    """
    whole = _message(content)
    pieces = [_message(each) for each in whole.get(1, [])]
    trained, normalised = (_message(b"".join(whole.get(number, []))) for number in (2, 3))
    return Pieces(
        texts=[_last(piece, 1, b"").decode() for piece in pieces],
        scores=[struct.unpack("<f", _last(piece, 2, bytes(4)))[0] for piece in pieces],
        kinds=[_last(piece, 3, NORMAL) for piece in pieces],
        is_bpe=_last(trained, 3, 1) == _BPE,
        has_bytes=bool(_last(trained, 35, 0)),
        adds_space=bool(_last(normalised, 3, 1)),
        joins_spaces=bool(_last(normalised, 4, 1)),
        has_map=bool(_last(normalised, 2, b"")),
    )


def _last(message: Message, number: int, default: Any) -> Any:
    return message[number][-1] if number in message else default


def _message(content: bytes) -> Message:
    found: Message = {}
    for number, value in _fields(content):
        found.setdefault(number, []).append(value)
    return found


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a message."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _varint(content, at)
        if size is None or at + size > len(content):
            raise ValueError("it is damaged, or no model of sentencepiece")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Returns a number, and where it ends."""
    number = 0
    for place, octet in enumerate(content[at : at + 10]):
        number |= (octet & 127) << 7 * place
        if octet < 128:
            return number, at + place + 1
    raise ValueError("it is damaged, or no model of sentencepiece")


def merges_of_scores(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[list[str]]:
    """Returns the merges that SentencePiece makes: the two symbols whose token has the highest
    score.

    SentencePiece has no list of merges; it joins any two symbols whose text is a token. Each split
    of a token into two tokens is a merge, therefore, and the token's score is its rank. The splits
    of one token have the same score; the longest first part comes first, as in transformers.
    """
    ranks = {
        token: -score
        for token, kind, score in zip(tokens, kinds, scores, strict=False)
        if kind == NORMAL
    }
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for middle in range(len(token) - 1, 0, -1):
            left, right = token[:middle], token[middle:]
            if left in ranks and right in ranks:
                merges.append([left, right])
    return merges
