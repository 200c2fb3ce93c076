"""Makes tokenizers of the files of `sentencepiece`, tokenizer.model, of families whose repositories
bring code of their own for them: InternLM 1 and 2, Baichuan and Orion.

Pieces that are joined by scores (BPE) are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from shmllm.errors import EngineStartError
from shmllm.formats.added_tokens import text_of_token
from shmllm.formats.pieces import SPACE, USER_DEFINED, Pieces, merges_of_scores, read_pieces
from shmllm.formats.text_files import one_line, read_json_object

SENTENCE_PIECE = "tokenizer.model"
_CLASSES = (
    *("InternLMTokenizer", "InternLM2Tokenizer", "InternLM2TokenizerFast"),
    *("BaichuanTokenizer", "OrionTokenizer"),
)
"""The classes whose files are read. They put `bos` in front of a text unless ``add_bos_token`` of
tokenizer_config.json is false."""
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The special tokens that these classes have without a word of tokenizer_config.json."""


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
