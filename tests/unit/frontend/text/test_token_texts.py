"""TokenTexts: the text of a single token; a character belongs to the token that completes it."""

from __future__ import annotations

import pytest
from support.tokenizer_helpers import token_id_of
from transformers import ByT5Tokenizer

from shmllm.frontend.text.token_texts import TokenTexts
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import TransformersBackend


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request, tokenizer_of):
    return tokenizer_of(request.param)


def texts_of(tokenizer, ids):
    texts = TokenTexts(tokenizer)
    return [texts(ids[max(i - 4, 0) : i], token) for i, token in enumerate(ids)]


@pytest.mark.parametrize("text", ["dog again", "the 😀 fox", "é"])
def test_the_texts_of_a_sequence_join_to_its_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = texts_of(tokenizer, ids)
    assert "".join(texts).strip() == text
    assert "\ufffd" not in "".join(texts)


def test_a_character_belongs_to_the_token_that_completes_it(tokenizer):
    ids = tokenizer.encode("😸", add_special_tokens=False)
    texts = texts_of(tokenizer, ids)
    assert texts[-1].strip() == "😸"
    assert not "".join(texts[:-1]).strip()


def test_a_tokenizer_that_leaves_the_first_bytes_of_a_character_out():
    tokenizer = Tokenizer(TransformersBackend(ByT5Tokenizer()))
    ids = tokenizer.encode("a😸é", add_special_tokens=False)
    assert texts_of(tokenizer, ids) == ["a", "", "", "", "😸", "", "é"]


def test_an_alternative_in_the_middle_of_a_character_has_no_text(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("😸", add_special_tokens=False)
    assert TokenTexts(tokenizer)([], ids[0]) == ""


def test_special_tokens_have_their_text(tokenizer):
    token = token_id_of(tokenizer, "<|end|>")
    assert TokenTexts(tokenizer)([], token) == "<|end|>"
