"""Tokenizers in the files of `sentencepiece`, tokenizer.model, of families whose repositories bring
code of their own for them: InternLM 1 and 2, Baichuan and Orion.

Such a file is a message of protocol buffers (`sentencepiece_model.proto`): pieces with scores, how
they were found, and how texts are normalised. Those of the type BPE are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from shmllm.errors import EngineStartError
from shmllm.formats.added_tokens import text_of_token
from shmllm.formats.text_files import one_line, read_json_object

SENTENCE_PIECE = "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""The types of pieces; llama.cpp's of tokens are the same."""
SPACE = "\u2581"
_CLASSES = (
    *("InternLMTokenizer", "InternLM2Tokenizer", "InternLM2TokenizerFast"),
    *("BaichuanTokenizer", "OrionTokenizer"),
)
"""The classes whose files are read. They put `bos` in front of a text unless ``add_bos_token`` of
tokenizer_config.json is false."""
_BPE = 2
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The special tokens that these classes have without a word of tokenizer_config.json."""
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


def load_sentence_piece(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]] | None:
    """Loads a directory's tokenizer.model.

    Returns:
        The tokenizer, and special tokens by name; None if the directory has no such file, or one
        of another class.

    Raises:
        EngineStartError: the file is malformed, or of a type that is not read.
    """
    path = directory / SENTENCE_PIECE
    settings = read_json_object(directory / "tokenizer_config.json")
    if settings.get("tokenizer_class") not in _CLASSES or not path.is_file():
        return None
    try:
        pieces = read_pieces(path.read_bytes())
        _check(pieces)
        return _tokenizer(pieces, settings, _added(directory, settings)), _NAMES
    except Exception as error:
        raise EngineStartError(
            f"cannot read {path}: {type(error).__name__}: {one_line(error)}"
        ) from error


def _check(pieces: Pieces) -> None:
    for found, what in (
        (not pieces.is_bpe, "pieces that are not joined by scores (BPE)"),
        (pieces.joins_spaces, "remove_extra_whitespaces"),
        (pieces.has_map, "a map of characters"),
    ):
        if found:
            raise ValueError(f"{what} are not supported")
    if not pieces.texts:
        raise ValueError("it has no pieces")


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


def _added(directory: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Returns the tokens that the files beside the model add or change, by id."""
    found = {
        int(number): AddedToken(
            text_of_token(token) or "",
            lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False),
            normalized=False,
            special=token.get("special", True),
        )
        for number, token in (settings.get("added_tokens_decoder") or {}).items()
    }
    for text, number in read_json_object(directory / "added_tokens.json").items():
        found.setdefault(number, AddedToken(text, normalized=False, special=True))
    return found


def _tokenizer(
    pieces: Pieces, settings: Mapping[str, Any], added: dict[int, AddedToken]
) -> tokenizers.Tokenizer:
    vocabulary: dict[str, int] = {}
    for number, text in enumerate(pieces.texts):
        vocabulary.setdefault(text, number)
    named = {name: text_of_token(settings.get(name)) or text for name, text in _NAMES.items()}
    for text in named.values():
        if (place := vocabulary.get(text)) is not None:
            added.setdefault(place, AddedToken(text, normalized=False, special=True))
    for number, (text, kind) in enumerate(zip(pieces.texts, pieces.kinds, strict=True)):
        if kind == USER_DEFINED:
            added.setdefault(number, AddedToken(text, normalized=False, special=False))
    vocabulary |= {token.content: number for number, token in added.items()}
    merges = merges_of_scores(pieces.texts, pieces.kinds, pieces.scores)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for left, right in merges],
            unk_token=named["unk_token"] if named["unk_token"] in vocabulary else None,
            fuse_unk=True,
            byte_fallback=pieces.has_bytes,
        )
    )
    before: list[Any] = [normalizers.Replace(" ", SPACE)]
    behind: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.adds_space:
        before.insert(0, normalizers.Prepend(SPACE))
        behind.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(before)
    tokenizer.decoder = decoders.Sequence(behind)
    tokenizer.add_tokens([added[number] for number in sorted(added)])
    tokenizer.post_processor = _template(settings, named, vocabulary)
    return tokenizer


def _template(settings: Mapping[str, Any], named: Mapping[str, str], ids: Mapping[str, int]) -> Any:
    """Returns what puts `bos` and `eos` around a text, or nothing."""
    adds = {"bos_token": settings.get("add_bos_token", True) is not False}
    adds["eos_token"] = settings.get("add_eos_token", False) is True
    bos, eos = (named[name] if adds[name] and named[name] in ids else "" for name in adds)
    around = [(text, ids[text]) for text in (bos, eos) if text]
    single, second = (" ".join(filter(None, (bos, each, eos))) for each in ("$A", "$B:1"))
    return processors.TemplateProcessing(
        single=single, pair=f"{single} {second}", special_tokens=around
    )
