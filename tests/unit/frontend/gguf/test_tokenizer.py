"""Tokenizers made from GGUF files, compared with tokenizers that others made."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from support.gguf_models import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    add_bundled_vocabulary,
    add_vocabulary,
    write,
)
from tokenizers import pre_tokenizers

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.tokenizer import make_tokenizer
from shmllm.frontend.model_files import resolve_model
from shmllm.frontend.text.tokenizer import Tokenizer

PIECES = [
    *"abcdefXYZ0123456789.,;:!?'\"()[]{}<>+-*/=_|~$^\\@#%&`",
    *" \n\t\r\u00a0\u2003éßüçñ漢字かな한글🙂👩\u200dعب\u0301ǅⅣ½²",
    "'s", "'LL", "'re", "  ", "   ", "\r\n", "\n\n", " the", "import os", "self.", "return ",
]  # fmt: skip


def texts(extra: Sequence[str] = (), number: int = 400) -> list[str]:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    pieces = [*PIECES, *extra]
    made = ["".join(rng.choices(pieces, k=rng.randint(0, 24))) for _ in range(number)]
    return ["", " ", "  x", "x  ", "12345 67", *made]


def load(directory: Path, fill: Callable[[gguf.GGUFWriter], object]) -> Tokenizer:
    """The tokenizer of a file with this vocabulary, as the front end loads it."""
    header = read_header(write(directory / "m.gguf", "llama", fill))
    for name, content in zip(
        ("tokenizer.json", "tokenizer_config.json"), make_tokenizer(header), strict=True
    ):
        (directory / name).write_text(json.dumps(content))
    return Tokenizer.from_directory(directory)


def bundled(pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    """The bundled model's own tokenizer, with words cut in another way."""
    tokenizer = tokenizers.Tokenizer.from_file(str(resolve_model("tiny") / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def isolated(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def digits_and_words() -> Any:
    """What SmolLM's own tokenizer.json has."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, byte_level()])


def listed_by_transformers(name: str) -> Any:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    return isolated(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS[name])


@pytest.mark.parametrize(
    ("name", "pre_tokenizer", "normalizer"),
    [
        ("gpt-2", byte_level, None),
        ("smollm", digits_and_words, None),
        ("command-r", digits_and_words, tokenizers.normalizers.NFC()),  # CohereTokenizer's parts
        ("olmo", byte_level, tokenizers.normalizers.NFC()),  # GPT-NeoX's
        ("glm4", lambda: listed_by_transformers("llama-bpe"), None),
        ("llama-bpe", lambda: listed_by_transformers("llama-bpe"), None),
        ("qwen2", lambda: listed_by_transformers("qwen2"), tokenizers.normalizers.NFC()),
        ("deepseek-r1-qwen", lambda: listed_by_transformers("deepseek-r1-qwen"), None),
        ("tekken", lambda: listed_by_transformers("tekken"), None),
        ("gpt-4o", lambda: listed_by_transformers("gpt-4o"), None),
        ("minimax-m2", lambda: listed_by_transformers("minimax-m2"), None),
    ],
)
def test_byte_level_vocabularies_encode_as_their_own_tokenizers(
    name: str, pre_tokenizer: Callable[[], Any], normalizer: Any, tmp_path: Path
) -> None:
    ours = load(
        tmp_path,
        lambda writer: (
            add_bundled_vocabulary(writer, pre=name),
            writer.add_add_bos_token(False),
        ),
    )
    theirs = bundled(pre_tokenizer(), normalizer)
    if name in ("llama-bpe", "tekken"):  # a word that is a token is taken whole
        theirs.model.ignore_merges = True
    for text in texts(["<|im_start|>", "<|endoftext|>"]):
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, skip_special_tokens=False
        )
        if normalizer is None:
            assert ours.decode(ids, skip_special_tokens=False) == text
    table = ours.byte_table(skip_special_tokens=False)
    assert table is not None
    assert table[ours.encode("é")[0]]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # llama.cpp's four patterns, each of which cuts what the ones before it left
        ("default", "don't, 12345!! $x", "don|'|t|,| |123|45|!!| |$|x"),
        ("deepseek-llm", "it's fooBar 12345 x?\n \u03bb", "it|'|s| fooBar| |12345| x|?|\n| \u03bb"),
        ("deepseek-llm", "a\u6f22\u5b57\uff0c  ", "a|\u6f22\u5b57|\uff0c|  "),
        ("kimi-k2", "it's fooBar 12345 x/\n", "it's| foo|Bar| |123|45| x|/\n"),
        ("kimi-k2", "a\u6f22\u5b57b \u6f22", "a|\u6f22\u5b57|b| |\u6f22"),
        (
            "youtu",
            "it's fooBar 12 \ud55c\uae00\u6f22\u5b57\uff0c",
            "it's| foo|Bar| |1|2| |\ud55c\uae00|\u6f22\u5b57|\uff0c",
        ),
        ("tiny_aya", "it's fooBar 1234567,", "it's| foo|Bar| |1|234|567|,"),
        ("minicpm5", "it's fooBar 1234567,", "it|'s| fooBar| |123|456|7|,"),
        ("viking", "it's, fooBar 12.", "it's|,| fooBar| |1|2|."),
    ],
)
def test_texts_are_cut_into_words(name: str, text: str, expected: str, tmp_path: Path) -> None:
    load(tmp_path, lambda writer: add_bundled_vocabulary(writer, pre=name))
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = [text[slice(*place)] for _, place in made.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(words) == expected


def test_a_file_without_a_name_is_cut_by_the_default(tmp_path: Path) -> None:
    def without(writer: gguf.GGUFWriter) -> None:
        add_bundled_vocabulary(writer, pre="default")
        del writer.kv_data[0]["tokenizer.ggml.pre"]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = load(tmp_path / "a", without)
    second = load(tmp_path / "b", lambda writer: add_bundled_vocabulary(writer, pre="default"))
    assert all(first.encode(text) == second.encode(text) for text in texts(number=40))


def failure(directory: Path, fill: Callable[[gguf.GGUFWriter], object]) -> str:
    with pytest.raises(EngineStartError) as caught:
        load(directory, fill)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    message = failure(tmp_path, lambda writer: add_bundled_vocabulary(writer, pre="pre-9"))
    assert "the pre-tokenizer 'pre-9' (tokenizer.ggml.pre) is not known; known: default" in message


def test_an_unknown_kind_of_tokenizer_is_named(tmp_path: Path) -> None:
    message = failure(
        tmp_path,
        lambda writer: (
            writer.add_tokenizer_model("rwkv"),
            writer.add_token_list(["a"]),
        ),
    )
    assert "tokenizer 'rwkv' is not supported; supported: gpt2, llama" in message


@pytest.mark.parametrize("missing", ["tokens", "merges", "scores"])
def test_a_missing_part_is_named(missing: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        if missing == "scores":
            add_sentence_piece(writer)
        else:
            add_bundled_vocabulary(writer)
        del writer.kv_data[0][f"tokenizer.ggml.{missing}"]

    assert f"no tokenizer.ggml.{missing}, which" in failure(tmp_path, fill)


def test_types_of_another_number_of_tokens_are_damage(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, ["a", "b"], [NORMAL], merges=["a b"])

    assert "2 tokens have 1 types" in failure(tmp_path, fill)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("gpt-2", {}, ["a"]),
        ("llama-bpe", {}, ["<s>", "a"]),
        ("llama-bpe", {"bos": False}, ["a"]),
        ("gpt-2", {"bos": True, "eos": True}, ["<s>", "a", "</s>"]),
    ],
)
def test_tokens_around_a_text(
    name: str, flags: dict[str, bool], expected: list[str], tmp_path: Path
) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(
            writer, ["<s>", "</s>", "a"], [CONTROL, CONTROL, NORMAL], merges=["a a"], pre=name
        )
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        for flag, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.add_{flag}_token", value)

    tokenizer = load(tmp_path, fill)
    assert [tokenizer.id_to_token(each) for each in tokenizer.encode("a")] == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [2]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_defined_tokens_are_found_and_remain_in_the_text(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        tokens = ["<think>", "<|end|>", "a", "Ġ"]
        add_vocabulary(
            writer, tokens, [USER_DEFINED, CONTROL, NORMAL, NORMAL], merges=["a a"], pre="gpt-2"
        )

    tokenizer = load(tmp_path, fill)
    ids = tokenizer.encode("<think>a<|end|>")
    assert ids == [0, 2, 1]
    assert tokenizer.decode(ids) == "<think>a"


@pytest.mark.parametrize(("name", "expected"), [("llama-bpe", ["abc"]), ("qwen2", ["a", "bc"])])
def test_some_take_a_word_whole_that_is_a_token(
    name: str, expected: list[str], tmp_path: Path
) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        tokens = ["a", "b", "c", "bc", "abc"]
        add_vocabulary(writer, tokens, [NORMAL] * 5, merges=["b c"], pre=name)

    tokenizer = load(tmp_path, fill)
    assert [tokenizer.id_to_token(each) for each in tokenizer.encode("abc")] == expected


def test_several_chat_templates_keep_their_names(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, ["a"], [NORMAL], merges=["a a"], pre="gpt-2")
        writer.add_chat_template(
            [
                {"name": "default", "template": "{{ messages[0].content }}"},
                {"name": "rag", "template": "rag: {{ messages[0].content }}"},
            ]
        )

    tokenizer = load(tmp_path, fill)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "hi"
    assert tokenizer.apply_chat_template(messages, chat_template="rag") == "rag: hi"


WORDS = [
    "the",
    "then",
    "than",
    "other",
    "another",
    "hello",
    "yellow",
    "a",
    "an",
    "hand",
    "é",
    "🙂🙂",
]


def add_sentence_piece(writer: gguf.GGUFWriter, scores: Sequence[float] | None = None) -> None:
    """Add a vocabulary of SentencePiece: bytes, all parts of some words, and all characters."""
    parts = {
        f"\u2581{word}"[begin:end]
        for word in WORDS
        for begin in range(len(word) + 1)
        for end in range(begin + 2, len(word) + 2)
    }
    characters = sorted({character for word in WORDS for character in word} | {"\u2581"})
    merged = sorted(parts, key=lambda part: (len(part), part))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    tokens += [*merged, *characters, "<extra>"]
    kinds += [NORMAL] * (len(merged) + len(characters)) + [USER_DEFINED]
    ranks = [-float(index) for index in range(len(tokens))]
    random.Random(2).shuffle(ranks)
    add_vocabulary(writer, tokens, kinds, scores=scores or ranks)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def sentence_piece_ids(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """SentencePiece's algorithm: join the leftmost pair with the highest score, then use bytes."""
    ranks = dict(zip(tokens, scores, strict=True))
    normal = set(tokens[259:-1])
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        found = [(-ranks[pair], at) for at, pair in enumerate(pairs) if pair in normal]
        if not found:
            break
        at = min(found)[1]
        symbols[at : at + 2] = [pairs[at]]
    ids: list[int] = []
    for symbol in symbols:
        in_vocabulary = symbol in normal
        ids += [tokens.index(symbol)] if in_vocabulary else [3 + byte for byte in symbol.encode()]
    return ids


def test_sentence_piece_encodes_by_scores_and_bytes(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, add_sentence_piece)
    metadata = read_header(tmp_path / "m.gguf").metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choices([*WORDS, " ", " ", "  ", "\n", "x", "漢"], k=rng.randint(1, 9)))
        ids = tokenizer.encode(text)
        assert ids == [1, *sentence_piece_ids(f" {text}", tokens, scores)], repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == [1]


def test_sentence_piece_without_a_prefix(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        lambda writer: (add_sentence_piece(writer), writer.add_add_space_prefix(False)),
    )
    ids = tokenizer.encode("hello <extra>é")
    assert tokenizer.id_to_token(ids[1]) == "hello"
    assert tokenizer.id_to_token(ids[-2]) == "<extra>"
    assert tokenizer.decode(ids) == "hello <extra>é"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
