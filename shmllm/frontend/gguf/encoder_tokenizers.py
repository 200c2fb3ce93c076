"""The tokenizers of encoders in GGUF files: WordPiece ("bert") and SentencePiece's Unigram ("t5").

llama.cpp cuts words as these do, but for words of more than 100 characters, which are one unknown
token of WordPiece.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from shmllm.formats.gguf import GgufHeader
from shmllm.formats.pieces import CONTROL, SPACE, UNKNOWN
from shmllm.frontend.gguf.vocabulary import Json, Vocabulary

_PREFIX = "##"
_CHARSMAP = "precompiled_charsmap"
_LOWERCASE, _STRIP_ACCENTS = "normalizer.lowercase", "normalizer.strip_accents"


def word_pieces(header: GgufHeader, vocabulary: Vocabulary) -> tuple[Json, bool]:
    """Returns a tokenizer, and that texts have a beginning. Tokens that begin a word have a space
    in front in files, and the others none.

    Files from before `tokenizer.ggml.normalizer.lowercase` do not say whether texts become lower
    case: they do unless a token has an upper-case letter.
    """
    first = vocabulary.needed("cls_token", "bos_token", "[CLS]")
    last = vocabulary.needed("sep_token", "eos_token", "[SEP]")
    unknown = vocabulary.needed("unk_token", "[UNK]")
    ids: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        ids.setdefault(_piece(token, kind), index)
    lowercase = vocabulary.flag(_LOWERCASE, not any(map(_is_upper, ids)))
    tokenizer = {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": vocabulary.flag(_STRIP_ACCENTS, lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(vocabulary, [first, "A", last], ["B", last], kind=1),
        "decoder": {"type": "WordPiece", "prefix": _PREFIX, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": _PREFIX,
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
    return tokenizer, True


def _piece(token: str, kind: int) -> str:
    if kind in (CONTROL, UNKNOWN):
        return token
    if token.startswith(SPACE):
        return token.removeprefix(SPACE)
    is_named = token.startswith("[") and token.endswith("]")  # of files that give it no kind
    return token if is_named else _PREFIX + token


def _is_upper(piece: str) -> bool:
    return not piece.startswith("[") and piece != piece.lower()


def unigram(header: GgufHeader, vocabulary: Vocabulary) -> tuple[Json, bool]:
    """Returns a tokenizer, and that texts have no beginning unless the file says so."""
    scores = vocabulary.array("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise header.error(
            f"{len(vocabulary.tokens):,} tokens have {len(scores):,} scores; the file is damaged"
        )
    normalizers: list[Json] = []
    if vocabulary.find(_CHARSMAP):
        encoded = base64.b64encode(_charsmap(header, vocabulary)).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    prefixed = vocabulary.flag("add_space_prefix", True)
    spaces = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if prefixed else "never",
        "split": True,
    }
    splits = [spaces]
    if vocabulary.flag("remove_extra_whitespaces", False):
        splits.insert(0, {"type": "WhitespaceSplit"})
    unknown = vocabulary.ids()[vocabulary.needed("unk_token", "<unk>")]
    tokenizer: Json = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [list(each) for each in zip(vocabulary.tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }
    if vocabulary.flag("add_bos_token", False):
        first = vocabulary.needed("bos_token", "cls_token", "<s>")
        last = vocabulary.needed("eos_token", "sep_token", "</s>")
        behind = [last, "B", last]
        tokenizer["post_processor"] = _template(vocabulary, [first, "A", last], behind, kind=0)
    return tokenizer, False


def _charsmap(header: GgufHeader, vocabulary: Vocabulary) -> bytes:
    """Returns sentencepiece's map of characters to others: the size of a double array of words of
    32 bits (Darts-clone), this, and the texts that its values are offsets of. `tokenizers` does not
    check that these lie within it."""
    octets = vocabulary.array(_CHARSMAP, int)
    damage = header.error(f"tokenizer.ggml.{_CHARSMAP} is damaged")
    if not all(type(each) is int and -128 <= each < 256 for each in octets):
        raise damage
    content = bytes(each & 255 for each in octets)
    size = int.from_bytes(content[:4], "little")
    num_texts = len(content) - 4 - size
    if size < 4 or size % 4 or num_texts < 1:
        raise damage
    units = memoryview(content[4 : 4 + size]).cast("I")
    for index, unit in enumerate(units):
        if unit >> 31:
            is_within = unit & 0x7FFF_FFFF < num_texts
        else:
            children = index ^ (unit >> 10) << ((unit & 512) >> 6)
            is_within = children | 255 < len(units)
        if not is_within:
            raise damage
    return content


def _template(
    vocabulary: Vocabulary, single: Sequence[str], behind: Sequence[str], *, kind: int
) -> Json:
    """The post-processor of a text, and of what is behind the first one of two, whose tokens have
    this type; "A" and "B" stand for the texts."""
    ids = vocabulary.ids()

    def parts(names: Sequence[str], type_id: int) -> list[Json]:
        return [
            {"Sequence" if name in ("A", "B") else "SpecialToken": {"id": name, "type_id": type_id}}
            for name in names
        ]

    special = sorted({*single, *behind} - {"A", "B"})
    return {
        "type": "TemplateProcessing",
        "single": parts(single, 0),
        "pair": parts(single, 0) + parts(behind, kind),
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in special
        },
    }
