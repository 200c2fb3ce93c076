"""Tokenizers whose decoder is Metaspace, as those of T5, mBART, NLLB, Pegasus and XGLM, for
llguidance, which reads the decoders ByteLevel and ByteFallback only.
"""

from __future__ import annotations

import json
from typing import Any

_NAME = "Metaspace"
_BYTE = "<0x"
"""How the pieces begin that a ByteFallback decoder takes for a byte. Metaspace writes them out."""


def without_metaspace(text: str) -> str | None:
    """Returns the same vocabulary with a decoder that llguidance reads.

    Pieces that it would take for bytes become special tokens, which no grammar of text allows.

    Args:
        text: a tokenizer.json.

    Returns:
        Another one; None if the decoder is not Metaspace.
    """
    if _NAME not in text:
        return None
    content = json.loads(text)
    decoder = content.get("decoder") or {}
    if decoder.get("type") != _NAME:
        return None
    space = {"String": decoder["replacement"]}
    decoders = [{"type": "Replace", "pattern": space, "content": " "}, {"type": "ByteFallback"}]
    content["decoder"] = {"type": "Sequence", "decoders": decoders}
    known = {token["id"] for token in content["added_tokens"]}
    content["added_tokens"] += [
        _special(number, piece)
        for number, piece in _pieces(content["model"]["vocab"])
        if piece.startswith(_BYTE) and number not in known
    ]
    return json.dumps(content)


def _pieces(vocabulary: Any) -> list[tuple[int, str]]:
    """The ids and pieces of a Unigram, which lists them with scores, or of another model."""
    if isinstance(vocabulary, list):
        return [(number, piece) for number, (piece, _) in enumerate(vocabulary)]
    return [(number, piece) for piece, number in vocabulary.items()]


def _special(number: int, piece: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": piece, "special": True} | flags
