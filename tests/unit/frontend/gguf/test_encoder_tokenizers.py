"""The tokenizers of encoders in GGUF files encode as those that the files are made from."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.gguf_models import CONTROL, NORMAL, UNKNOWN, Change, write
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.tokenizer import make_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Crème brûlée à la carte, ÜBER straße: 12,345 items!",
    "  several   spaces\tand\nlines ",
    "東京都 and [SEP] or <unk> $5.00 naïve façade",
    "x",
    "",
    "a" * 120,
]
SPACE = "\u2581"
BERT = {"[PAD]": CONTROL, "[UNK]": CONTROL, "[CLS]": CONTROL, "[SEP]": CONTROL, "[MASK]": CONTROL}
ROBERTA = {"<s>": CONTROL, "<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN}


def word_pieces(*, lowercase: bool) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=[*BERT])
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def stored_piece(piece: str) -> str:
    """As llama.cpp's conversion stores it."""
    if piece in BERT:
        return piece
    return piece.removeprefix("##") if piece.startswith("##") else SPACE + piece


def add_word_pieces(writer: gguf.GGUFWriter, made: Tokenizer) -> None:
    ids = made.get_vocab()
    pieces = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([stored_piece(piece) for piece in pieces])
    writer.add_token_types([BERT.get(piece, NORMAL) for piece in pieces])
    writer.add_uint32("tokenizer.ggml.cls_token_id", ids["[CLS]"])
    writer.add_sep_token_id(ids["[SEP]"])
    writer.add_unk_token_id(ids["[UNK]"])
    writer.add_pad_token_id(ids["[PAD]"])


def converted(tmp_path: Path, fill: Change) -> Tokenizer:
    file = write(tmp_path / "m.gguf", "bert", fill)
    tokenizer, _ = make_tokenizer(read_header(file))
    return Tokenizer.from_str(json.dumps(tokenizer))


def assert_same(found: Tokenizer, made: Tokenizer) -> None:
    for text in TEXTS:
        ours, theirs = found.encode(text), made.encode(text)
        assert ours.ids == theirs.ids, text
        pair, wanted = found.encode(text, TEXTS[0]), made.encode(text, TEXTS[0])
        assert (pair.ids, pair.type_ids) == (wanted.ids, wanted.type_ids), text


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("says", [True, False])
def test_word_pieces(lowercase: bool, says: bool, tmp_path: Path) -> None:
    made = word_pieces(lowercase=lowercase)

    def fill(writer: gguf.GGUFWriter) -> None:
        add_word_pieces(writer, made)
        if says:
            writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowercase)

    made.add_special_tokens([*BERT])
    assert_same(converted(tmp_path, fill), made)


def charsmap() -> bytes:
    """One of sentencepiece that replaces "A" by "a": a double array of Darts-clone, and the texts
    that its values are offsets of."""
    units = [0] * 256
    units[ord("A")] = ord("A") | 1 << 8 | (ord("A") ^ 128) << 10
    units[128] = 1 << 31
    array = struct.pack("<256I", *units)
    return struct.pack("<I", len(array)) + array + b"a\0"


def unigram(vocabulary: list[tuple[str, float]]) -> Tokenizer:
    made = Tokenizer(models.Unigram(vocabulary, unk_id=3))
    made.normalizer = normalizers.Precompiled(charsmap())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return made


def add_unigram(writer: gguf.GGUFWriter, vocabulary: list[tuple[str, float]]) -> None:
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece for piece, _ in vocabulary])
    writer.add_token_scores([score for _, score in vocabulary])
    writer.add_token_types([ROBERTA.get(piece, NORMAL) for piece, _ in vocabulary])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap())
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    for name, number in (("bos", 0), ("eos", 2), ("unk", 3), ("pad", 1)):
        getattr(writer, f"add_{name}_token_id")(number)


def test_unigrams(tmp_path: Path) -> None:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [text.replace("A", "a") for text in TEXTS],
        trainers.UnigramTrainer(vocab_size=90, special_tokens=[*ROBERTA], unk_token="<unk>"),
    )
    vocabulary = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"]]
    made = unigram(vocabulary)
    made.add_special_tokens([*ROBERTA])
    found = converted(tmp_path, lambda writer: add_unigram(writer, vocabulary))
    assert found.encode("BANANA").ids == made.encode("BANANA").ids
    assert_same(found, made)


def test_files_without_ids_have_the_usual_names(tmp_path: Path) -> None:
    made = word_pieces(lowercase=True)

    def fill(writer: gguf.GGUFWriter) -> None:
        add_word_pieces(writer, made)
        for name in ("cls", "seperator", "unknown", "padding"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}_token_id"]

    made.add_special_tokens([*BERT])
    assert_same(converted(tmp_path, fill), made)


def test_a_vocabulary_without_its_beginning_is_named(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["[UNK]", f"{SPACE}a"])

    with pytest.raises(EngineStartError, match=r"no token \[CLS\], which its tokenizer needs"):
        converted(tmp_path, fill)


def test_scores_of_another_number_of_pieces_are_damage(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_unigram(writer, [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)])
        writer.kv_data[0]["tokenizer.ggml.scores"].value.pop()

    with pytest.raises(EngineStartError, match="4 tokens have 3 scores"):
        converted(tmp_path, fill)


def damaged(at: int, octet: int) -> list[int]:
    content = [*charsmap()]
    content[at] = octet
    return content


@pytest.mark.parametrize(
    "content",
    [[1, 2, 3], "abc", [300], damaged(3, 1), damaged(0, 3), damaged(4 + 128 * 4, 9), damaged(7, 5)],
)
def test_a_damaged_map_of_characters_is_named(content: Any, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_unigram(writer, [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)])
        writer.kv_data[0]["tokenizer.ggml.precompiled_charsmap"].value = content

    with pytest.raises(EngineStartError, match="precompiled_charsmap"):
        converted(tmp_path, fill)
