"""Pairs, truncation and offsets, compared with transformers' tokenizers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoder_tokenizers import CORPUS, KINDS, our_tokenizer, transformers_tokenizer
from transformers import AutoTokenizer, PythonBackend

from shmllm.errors import RequestError
from shmllm.frontend.text.tokenizer import EncodedPair, Tokenizer
from shmllm.frontend.text.tokenizer_backend import NoBackend, TransformersBackend
from shmllm.frontend.text.truncation import Truncation, longest_first

WORDS = [word for text in CORPUS for word in text.split()]
PIECES = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(["[SEP]", "</s>", "<|endoftext|>", "é", "日本", "👩‍👧", "  ", "\n"]),
    st.text(max_size=4).filter(lambda text: text.isprintable()),
)
TEXTS = st.lists(PIECES, max_size=12).map(" ".join)
SIDES = st.sampled_from(["left", "right"])
MANY = settings(max_examples=60, deadline=None)

ours = cache(our_tokenizer)
theirs = cache(transformers_tokenizer)


class Letters(PythonBackend):  # type: ignore[misc]
    """A tokenizer of transformers without a tokenizer of the library: letters, [CLS] and [SEP]."""

    def __init__(self, **options: Any) -> None:
        self.letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz "]
        self.indexes = {letter: index for index, letter in enumerate(self.letters)}
        super().__init__(
            cls_token="[CLS]",
            sep_token="[SEP]",
            pad_token="[PAD]",
            unk_token="[UNK]",
            special_tokens_pattern="cls_sep",
            token_type_ids_pattern="bert_style",
            token_type_ids_include_special_tokens=True,
            model_input_names=["input_ids", "token_type_ids"],
            **options,
        )

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.indexes)

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.indexes.get(token, 1)

    def _convert_id_to_token(self, index: int) -> str:
        return self.letters[index]


def pair_of(tokenizer: Any, first: str, second: str, **options: Any) -> EncodedPair:
    """What a tokenizer of transformers makes of a pair. Of a pair alone it drops an empty second
    text, and with it the pair's template; not of pairs in lists, which CrossEncoder gives it."""
    encoded = tokenizer([first], [second], return_token_type_ids=True, **options)
    (ids,), (types,) = encoded["input_ids"], encoded["token_type_ids"]
    begin = types.index(1) if 1 in types else 0
    assert not begin or types == [0] * begin + [1] * (len(types) - begin)
    return EncodedPair(ids, begin)


@pytest.mark.parametrize("kind", KINDS)
@given(first=TEXTS, second=TEXTS, length=st.integers(4, 30), side=SIDES)
@MANY
def test_pairs_are_cut_as_by_transformers(
    kind: str, first: str, second: str, length: int, side: Any
) -> None:
    other = theirs(kind, truncation_side=side)
    (found,) = ours(kind).encode_pairs([(first, second)], length, side)
    assert found == pair_of(other, first, second, truncation=True, max_length=length)
    (whole,) = ours(kind).encode_pairs([(first, second)])
    assert whole == pair_of(other, first, second)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, length=st.integers(2, 20), side=SIDES, special=st.booleans())
@MANY
def test_texts_are_cut_as_by_transformers(
    kind: str, text: str, length: int, side: Any, special: bool
) -> None:
    options = {"truncation": True, "max_length": length, "add_special_tokens": special}
    expected = theirs(kind, truncation_side=side)(text, **options)["input_ids"]
    (found,) = ours(kind).encode_batch(
        [text], max_length=length, side=side, add_special_tokens=special
    )
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@MANY
def test_offsets_are_those_of_transformers(kind: str, text: str) -> None:
    expected = theirs(kind)(text, return_offsets_mapping=True)
    ids, offsets = ours(kind).encode_offsets(text)
    assert (ids, offsets) == (expected["input_ids"], expected["offset_mapping"])


def test_offsets_name_characters_of_the_text() -> None:
    text = "Á capital — 日本 city"
    ids, offsets = ours("bert").encode_offsets(text)
    assert len(ids) == len(offsets)
    assert (offsets[0], offsets[-1]) == ((0, 0), (0, 0))
    begin = text.index("city")
    covered = [each for each in offsets[1:-1] if each[0] >= begin]
    assert (covered[0][0], covered[-1][1]) == (begin, len(text))


def test_only_some_templates_give_the_second_text_another_type() -> None:
    segments = {kind: ours(kind).encode_pairs([("a b", "c")])[0].second_segment for kind in KINDS}
    assert segments["bert"] == 4  # [CLS] a b [SEP]
    assert segments["roberta"] == 0


@given(
    first=st.text("abc ", max_size=9),
    second=st.text("xyz ", max_size=9),
    length=st.integers(3, 14),
    side=SIDES,
)
@MANY
def test_the_fallback_cuts_as_transformers(first: str, second: str, length: int, side: Any) -> None:
    backend = TransformersBackend(Letters())
    tokenizer, other = Tokenizer(backend), Letters(truncation_side=side)
    cut = {"truncation": True, "max_length": length}
    assert tokenizer.encode_batch([first], max_length=length, side=side) == [
        other(first, **cut)["input_ids"]
    ]
    (found,) = tokenizer.encode_pairs([(first, second)], length, side)
    assert found == pair_of(other, first, second, **cut)
    (whole,) = tokenizer.encode_pairs([(first, second)])
    assert whole == pair_of(other, first, second)


def test_the_fallback_knows_no_offsets() -> None:
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        Tokenizer(TransformersBackend(Letters())).encode_offsets("abc")


def test_many_texts_are_cut_as_each_alone() -> None:
    tokenizer = ours("bert")
    texts = [" ".join(WORDS[:n]) for n in range(30)]
    pairs = list(zip(texts, reversed(texts), strict=True))
    assert tokenizer.encode_batch(texts, max_length=9) == [
        tokenizer.encode_batch([text], max_length=9)[0] for text in texts
    ]
    assert tokenizer.encode_pairs(pairs, 9) == [
        tokenizer.encode_pairs([pair], 9)[0] for pair in pairs
    ]


@pytest.mark.parametrize(
    "tokenizer", [our_tokenizer("bert"), Tokenizer(TransformersBackend(Letters()))]
)
def test_threads_that_cut_differently_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    texts = ["the quick brown fox jumps over", "what is the capital of france"]
    asked = [(length, side) for length in (4, 6, 9) for side in ("left", "right")] * 20

    def run(each: tuple[int, Any]) -> Any:
        length, side = each
        return (
            tokenizer.encode_batch(texts, max_length=length, side=side),
            tokenizer.encode_pairs([(texts[0], texts[1])], length, side),
            tokenizer.encode(texts[0]),
        )

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, asked)) == [run(each) for each in asked]


@pytest.mark.parametrize(("kind", "of_text", "of_pair"), [("bert", 2, 3), ("roberta", 2, 4)])
def test_less_than_the_special_tokens_is_refused(kind: str, of_text: int, of_pair: int) -> None:
    tokenizer = ours(kind)
    assert len(tokenizer.encode_batch(["fox"], max_length=of_text)[0]) == of_text
    assert len(tokenizer.encode_pairs([("fox", "dog")], of_pair)[0].ids) == of_pair
    with pytest.raises(RequestError, match=f"adds {of_text} special tokens"):
        tokenizer.encode_batch(["fox"], max_length=of_text - 1)
    with pytest.raises(RequestError, match=f"adds {of_pair} special tokens") as caught:
        tokenizer.encode_pairs([("fox", "dog")], of_pair - 1)
    assert caught.value.parameter == "truncate_prompt_tokens"
    with pytest.raises(RequestError, match="keep at least 1"):
        tokenizer.encode_batch(["fox"], max_length=0, add_special_tokens=False)


def test_a_pair_that_cannot_be_encoded_is_named() -> None:
    pairs: list[Any] = [("fine", "fine"), ("fine", "ab\ud800")]
    with pytest.raises(RequestError, match="text 1 of pair 1 is not valid Unicode"):
        ours("bert").encode_pairs(pairs)
    pairs[0] = (None, "fine")
    with pytest.raises(RequestError, match="text 0 of pair 0 to tokenize must be a str"):
        ours("bert").encode_pairs(pairs)
    with pytest.raises(RequestError, match="must be a str"):
        ours("bert").encode_offsets(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.encode_batch(["a"], max_length=3),
        lambda it: it.encode_pairs([("a", "b")], 3),
        lambda it: it.encode_offsets("a"),
    ],
)
def test_without_a_tokenizer_each_is_refused(call: Any) -> None:
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        call(Tokenizer(NoBackend()))


@given(first=st.integers(0, 40), second=st.integers(0, 40), room=st.integers(0, 60))
def test_longest_first_fills_the_room(first: int, second: int, room: int) -> None:
    kept = longest_first(first, second, room)
    assert sum(kept) == min(first + second, room)
    assert kept[0] <= first
    assert kept[1] <= second


def test_prompts_of_token_ids_are_cut_on_a_side() -> None:
    ids = [*range(10)]
    assert Truncation(4).of_tokens(ids, 8) == ids[:4]
    assert Truncation(4, "left").of_tokens(ids, 8) == ids[-4:]
    assert Truncation().of_tokens(ids, 8) == ids[:8]
    assert Truncation(8).of_tokens(ids[:3], 8) == ids[:3]


@pytest.mark.parametrize("kept", [0, -2, 9, True, 2.0, "3", None])
def test_other_lengths_are_refused(kept: Any) -> None:
    with pytest.raises(RequestError, match="-1 or a whole number from 1 to 8"):
        Truncation(kept).of_tokens([1], 8)


def test_another_side_is_refused() -> None:
    with pytest.raises(RequestError, match="truncation_side must be"):
        Truncation(3, "middle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "segment"),
    [
        ({}, 0),
        ({"model_input_names": ["input_ids", "token_type_ids"]}, 4),
        ({"model_input_names": ["input_ids"]}, 0),
    ],
)
def test_the_model_gets_token_types_if_transformers_gives_them(
    tmp_path: Path, options: dict[str, Any], segment: int
) -> None:
    transformers_tokenizer("bert", **options).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    types = loaded("a b", "c").get("token_type_ids", [])
    assert (types.index(1) if types else 0) == segment
    (pair,) = Tokenizer.from_directory(tmp_path).encode_pairs([("a b", "c")])
    assert pair.second_segment == segment


def test_berts_class_gives_token_types(tmp_path: Path) -> None:
    transformers_tokenizer("bert").save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    for name in ("BertTokenizer", "BertTokenizerFast"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
        types = AutoTokenizer.from_pretrained(tmp_path)("a b", "c")["token_type_ids"]
        (pair,) = Tokenizer.from_directory(tmp_path).encode_pairs([("a b", "c")])
        assert pair.second_segment == types.index(1) == 4
    path.unlink()
    (pair,) = Tokenizer.from_directory(tmp_path).encode_pairs([("a b", "c")])
    assert pair.second_segment == 4


def test_the_file_of_the_tokenizer_cuts_nothing(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2's tokenizer.json cuts and pads at 128 tokens."""
    library = theirs("bert").backend_tokenizer.from_str(theirs("bert").backend_tokenizer.to_str())
    library.enable_truncation(5)
    library.enable_padding(length=5)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode_pairs([("a", CORPUS[0])]) == ours("bert").encode_pairs(
        [("a", CORPUS[0])]
    )
    assert len(tokenizer.encode("a")) == 3
