"""Tokenizers in files of sentencepiece."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from shmllm.errors import EngineStartError
from shmllm.formats.pieces import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
)
from shmllm.formats.sentence_piece import load_sentence_piece
from shmllm.formats.tokenizer_files import load_tokenizer

TEXTS = (
    *("", " ", "a", "the cat", " the  cat ", "cat\n\tthe", "\u00e9\u6f22", "<s>the</s>"),
    *("x<mark>the cat", "<mark> the", "thethe", "\U0001f642cat"),
)


def varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def model(**changes: Any) -> bytes:
    """The content of a file with few pieces."""
    words = [SPACE, *"thecax", "th", "the", f"{SPACE}the", "ca", "cat", f"{SPACE}cat"]
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces += [(f"<0x{octet:02X}>", BYTE) for octet in range(256)]
    pieces += [(word, NORMAL) for word in sorted(words, key=len, reverse=True)]
    pieces += [("[own]", USER_DEFINED)]
    scores = {word: -float(rank) for rank, word in enumerate(sorted(set(words), key=len)[::-1])}
    content = b""
    for text, kind in pieces:
        piece = field(1, text.encode()) + field(2, scores.get(text, 0.0)) + field(3, kind)
        content += field(1, piece)
    trained = field(3, changes.get("type", 2)) + field(35, int(changes.get("bytes", True)))
    normalised = field(1, b"identity") + field(3, int(changes.get("adds_space", False)))
    normalised += field(4, int(changes.get("joins_spaces", False)))
    normalised += field(2, changes.get("map", b""))
    return content + field(2, trained) + field(3, normalised)


SETTINGS: dict[str, Any] = {
    "tokenizer_class": "InternLM2Tokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "added_tokens_decoder": {"300": {"content": "<mark>", "special": True}},
}


def write(directory: Path, content: bytes, **settings: Any) -> Path:
    (directory / "tokenizer.model").write_bytes(content)
    (directory / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    return directory


@pytest.mark.parametrize("adds_space", [False, True])
def test_texts_and_tokens(adds_space: bool, tmp_path: Path) -> None:
    loaded = load_tokenizer(write(tmp_path, model(adds_space=adds_space)))
    tokenizer, first = loaded.tokenizer, f"{SPACE}the" if adds_space else "the"
    found = tokenizer.encode("the cat\u00e9")
    assert found.tokens == ["<s>", first, f"{SPACE}cat", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found.ids) == "the cat\u00e9"
    assert tokenizer.encode("<mark>[own]", add_special_tokens=False).tokens == ["<mark>", "[own]"]
    assert tokenizer.token_to_id("<mark>") == 300
    assert loaded.special_tokens["eos_token"] == "</s>"


def test_bos_is_left_out_where_the_settings_say_so(tmp_path: Path) -> None:
    write(tmp_path, model(), tokenizer_class="BaichuanTokenizer", add_bos_token=False)
    assert load_tokenizer(tmp_path).tokenizer.encode("the").tokens == ["the"]
    write(tmp_path, model(), add_bos_token=False, add_eos_token=True)
    assert load_tokenizer(tmp_path).tokenizer.encode("the").tokens == ["the", "</s>"]


def test_tokens_of_another_file_are_added(tmp_path: Path) -> None:
    write(tmp_path, model(), added_tokens_decoder=None)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<img>": 400}))
    assert load_tokenizer(tmp_path).tokenizer.encode("x<img>").ids[-1] == 400


def test_other_classes_are_left_to_transformers(tmp_path: Path) -> None:
    write(tmp_path, model(), tokenizer_class="LlamaTokenizer")
    assert load_sentence_piece(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (model(type=1), "pieces that are not joined by scores"),
        (model(joins_spaces=True), "remove_extra_whitespaces are not supported"),
        (model(map=b"x"), "a map of characters are not supported"),
        (model()[:-3], "it is damaged, or no model of sentencepiece"),
        (b"\xff" * 20, "it is damaged, or no model of sentencepiece"),
        (b"", "pieces that are not joined"),
    ],
)
def test_damaged_files_and_other_types(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=message):
        load_tokenizer(write(tmp_path, content))


@pytest.mark.slow
@pytest.mark.parametrize("adds_space", [False, True])
def test_tokens_are_those_of_the_package(adds_space: bool, tmp_path: Path) -> None:
    """`pip install sentencepiece` first; without it this test is skipped."""
    package: Any = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(path.read_text() for path in Path(__file__).parent.glob("*.py")))
    package.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=adds_space,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["[own]"],
        minloglevel=1,
    )
    reference = package.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    content = (tmp_path / "tokenizer.model").read_bytes()
    write(tmp_path, content, add_bos_token=False, added_tokens_decoder=None)
    tokenizer = load_tokenizer(tmp_path).tokenizer
    plain = [text for text in (*TEXTS, *corpus.read_text().splitlines()) if "<" not in text]
    assert len(plain) > 500
    for text in plain:
        if "[own]" not in text:  # behind which transformers puts another space
            ids = tokenizer.encode(text).ids
            assert ids == reference.encode(text)
            assert tokenizer.decode(ids) == reference.decode(ids)
