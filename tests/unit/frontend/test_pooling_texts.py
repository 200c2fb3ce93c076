"""Texts of pooling requests: late chunks, prompts by name, pairs, and texts that are divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.encoder_tokenizers import our_tokenizer, transformers_tokenizer

from shmllm.config.pooling import PoolingInfo
from shmllm.errors import RequestError
from shmllm.frontend.pooling import long_texts
from shmllm.frontend.pooling.late_chunking import chunk_text
from shmllm.frontend.pooling.named_prompts import named_prompt, num_skipped, with_prompt
from shmllm.frontend.pooling.pair_prompts import PairOptions, cut_texts, make_pairs
from shmllm.frontend.text.truncation import Truncation
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput

TEXT = "The quick brown fox: 中文 café jumps over the lazy dog."
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ sign }}{% endfor %}"
INFO = PoolingInfo(prompts={"query": "find: ", "document": ""}, include_prompt=False)


@pytest.mark.parametrize("kind", ["bert", "qwen"])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_chunks_have_the_ranges_of_their_tokens(kind: str, size: int) -> None:
    prompt, found = chunk_text(our_tokenizer(kind), "the prompt", TEXT, size)
    encoded = transformers_tokenizer(kind)(TEXT, return_offsets_mapping=True)
    assert prompt == {"prompt": TEXT, "prompt_token_ids": encoded["input_ids"]}
    assert (found.chunk_size, found.input_tokens) == (size, len(encoded["input_ids"]))
    for begin, chunk in zip(range(0, found.input_tokens, size), found.chunks, strict=True):
        own = [(a, b) for a, b in encoded["offset_mapping"][begin : begin + size] if a < b]
        assert chunk.token_range == (begin, min(begin + size, found.input_tokens))
        wanted = (min(a for a, _ in own), max(b for _, b in own)) if own else None
        assert chunk.char_range == wanted


@pytest.mark.parametrize("prompt", ["", [1, 2], {"prompt": "a", "prompt_token_ids": [1]}, None])
def test_chunks_are_made_of_texts_only(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt 3: Late chunking requires nonempty plain-text"):
        chunk_text(our_tokenizer("bert"), "prompt 3", prompt, 2)


def test_prompts_precede_texts() -> None:
    text = named_prompt(INFO, "query")
    names = ["prompt 0", "prompt 1"]
    found = with_prompt(text, ["a fox", {"prompt": "a dog", "cache_salt": "s"}], names)
    assert found == ["find: a fox", {"prompt": "find: a dog", "cache_salt": "s"}]
    with pytest.raises(RequestError, match=r"'other' is not one of .*: 'query', 'document'"):
        named_prompt(INFO, "other")
    with pytest.raises(RequestError, match="'q' is not one of the model's prompts: none"):
        named_prompt(PoolingInfo(), "q")
    with pytest.raises(RequestError, match="prompt 1: prompt_name is for text"):
        with_prompt(text, ["a", [1, 2]], names)


def test_a_mean_leaves_out_the_tokens_of_the_prompt_without_the_last_special_one() -> None:
    bert, gpt = our_tokenizer("bert"), our_tokenizer("gpt")
    assert num_skipped(INFO, bert, "find: ", "MEAN") == len(bert.encode("find: ")) - 1
    assert num_skipped(INFO, gpt, "find: ", "MEAN") == len(gpt.encode("find: "))
    assert num_skipped(INFO, bert, "", "MEAN") == 0
    assert num_skipped(INFO, bert, "find: ", "LAST") == 0
    assert num_skipped(PoolingInfo(), bert, "find: ", "MEAN") == 0
    with pytest.raises(RequestError, match="include_prompt"):
        num_skipped(INFO, bert, "find: ", "CLS")


@pytest.mark.parametrize(("kind", "types"), [("bert", True), ("bert", False), ("roberta", False)])
def test_pairs_are_the_tokenizers(kind: str, types: bool) -> None:
    info = PoolingInfo(token_types=types)
    tokenizer = our_tokenizer(kind)
    queries, documents = ["a fox"] * 2, ["the dog", {"prompt": "Paris"}]
    found = make_pairs(tokenizer, info, queries, documents, PairOptions(), 64)
    for pair, document in zip(found, ["the dog", "Paris"], strict=True):
        encoded = transformers_tokenizer(kind)("a fox", document, return_token_type_ids=True)
        assert pair.prompt == {"prompt_token_ids": encoded["input_ids"]}
        second = encoded["token_type_ids"].index(1) if types else 0
        assert pair.second_segment == second


def test_pairs_are_cut_from_the_longer_text() -> None:
    options = PairOptions(Truncation(12))
    pair = make_pairs(our_tokenizer("bert"), PoolingInfo(), ["a fox"], [TEXT], options, 64)[0]
    encoded = transformers_tokenizer("bert")("a fox", TEXT, truncation=True, max_length=12)
    assert pair.prompt == {"prompt_token_ids": encoded["input_ids"]}


def test_models_that_are_asked_in_words_read_one_text() -> None:
    info = PoolingInfo(separates_pairs=False)
    pairs = make_pairs(our_tokenizer("gpt"), info, ["a"], ["b"], PairOptions(), 64)
    assert [(pair.prompt, pair.second_segment) for pair in pairs] == [("ab", 0)]
    options = PairOptions.make(
        None, TEMPLATE, {"chat_template_kwargs": {"sign": "!"}}, max_model_len=64
    )
    pairs = make_pairs(our_tokenizer("bert"), PoolingInfo(), ["a"], ["b"], options, 64)
    assert [pair.prompt for pair in pairs] == ["<query>a!<document>b!"]


@pytest.mark.parametrize("data", [[1, 2], {"prompt_token_ids": [1]}, {"content": []}])
def test_pairs_are_of_texts(data: Any) -> None:
    with pytest.raises(RequestError, match="document 0 must be a text"):
        make_pairs(our_tokenizer("bert"), PoolingInfo(), ["a"], [data], PairOptions(), 64)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_tokens": 3}, "extra_kwargs has 'max_tokens'; score takes max_tokens_per_query"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc must be a non-negative integer"),
        ({"max_tokens_per_query": 64}, r"\(64\) must be less than max_model_len \(64\)"),
        ({"chat_template_kwargs": {"tools": []}}, "reserved keys"),
    ],
)
def test_wrong_extra_kwargs_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PairOptions.make(None, None, extra, 64)


@pytest.mark.parametrize("kind", ["bert", "qwen", "gpt"])
@pytest.mark.parametrize("most", [1, 3, 8, 50])
def test_texts_are_cut_to_a_number_of_tokens(kind: str, most: int) -> None:
    tokenizer = our_tokenizer(kind)
    text, ids = cut_texts(tokenizer, [TEXT, [1] * 60], most)
    assert isinstance(text, str)
    assert TEXT.startswith(text)
    length = len(tokenizer.encode(text, add_special_tokens=False))
    assert 0 < length <= most
    assert length >= min(most - 2, len(tokenizer.encode(TEXT, add_special_tokens=False)))
    assert ids == [1] * 60
    assert cut_texts(tokenizer, [TEXT], 0) == [TEXT]


def output(vector: list[float], tokens: int, **changes: Any) -> Any:
    array = np.array(vector, np.float32)
    return PoolingRequestOutput("0", PoolingOutput(array), [7] * tokens, 1, **changes)


def test_parts_are_joined_by_their_tokens() -> None:
    parts = [output([1, 0], 6), output([0, 1], 2), output([2, 2], 3)]
    joint, single = long_texts.join(parts, [2, 1], [False, True])
    assert joint.outputs.array.tolist() == [0.75, 0.25]
    assert (joint.prompt_token_ids, joint.num_cached_tokens) == ([7] * 8, 2)
    assert single is parts[2]
    (joint,) = long_texts.join(parts[:2], [2], [True])
    assert joint.outputs.array == pytest.approx(np.array([3, 1]) / 10**0.5)
    failed = output([], 2, error="no", is_aborted=True)
    (joint,) = long_texts.join([parts[0], failed], [2], [True])
    assert (joint.error, joint.is_aborted, len(joint.outputs.array)) == ("no", True, 0)


def test_prompts_of_tokens_are_divided() -> None:
    prompt = {"prompt_token_ids": [*range(10)], "cache_salt": "s"}
    parts = long_texts.divide("prompt 1", prompt, 4, 10)
    assert [part["prompt_token_ids"] for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert {part["cache_salt"] for part in parts} == {"s"}
    with pytest.raises(RequestError, match="prompt 1 has 10 tokens; max_embed_len is 9"):
        long_texts.divide("prompt 1", prompt, 4, 9)


def test_texts_are_tokenized_beside_tokens_and_embeddings() -> None:
    tokenizer, embeds = our_tokenizer("bert"), np.ones((3, 4))
    prompts: list[Any] = ["a fox", [5, 6, 7, 8], {"prompt_embeds": embeds, "prompt": "shown"}]
    text, tokens, soft = long_texts.tokenize(tokenizer, prompts, Truncation(3), 64)
    assert text["prompt_token_ids"] == tokenizer.encode_batch(["a fox"], max_length=3)[0]
    assert tokens["prompt_token_ids"] == [5, 6, 7]
    assert soft == prompts[2]


def test_prompts_with_items_stay_whole() -> None:
    tokenizer, items = our_tokenizer("bert"), {"image": np.zeros((4, 4, 3), np.uint8)}
    prompts: list[Any] = [
        {"prompt": "a fox", "multi_modal_data": items},
        {"prompt_token_ids": [5, 6, 7, 8], "multi_modal_uuids": {"image": "mine"}},
    ]
    for number, prompt in enumerate(long_texts.tokenize(tokenizer, prompts, Truncation(3), 64)):
        assert prompt == prompts[number]
        assert long_texts.divide("prompt 1", prompt, 2, 9) == [prompt]
        with pytest.raises(
            RequestError, match=r"^prompt 1 has images or other items, so it cannot"
        ):
            long_texts.check_can_be_cut("prompt 1", prompt)
    with pytest.raises(RequestError, match=r"^prompt 1 consists of embeddings, which cannot be"):
        long_texts.check_can_be_cut("prompt 1", {"prompt_embeds": np.ones((3, 4))})
    for text in ("a fox", [5, 6], {"prompt": "a fox", "multi_modal_data": {}}):
        long_texts.check_can_be_cut("prompt 1", text)
