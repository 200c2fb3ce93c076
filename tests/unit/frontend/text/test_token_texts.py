"""TokenTexts: the text of an alternative, whole characters with the token that ends them."""

from __future__ import annotations

import pytest

from shmllm.frontend.text.token_texts import TokenTexts


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request, tokenizer_of):
    return tokenizer_of(request.param)


def texts_along(tokenizer, ids):
    texts = TokenTexts(tokenizer)
    return [texts(ids[max(i - 4, 0) : i], token) for i, token in enumerate(ids)]


@pytest.mark.parametrize("text", ["dog again", "the 😀 fox", "é"])
def test_texts_of_a_sequence_add_up(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = texts_along(tokenizer, ids)
    assert "".join(texts).strip() == text
    assert "\ufffd" not in "".join(texts)


def test_a_character_belongs_to_the_token_that_completes_it(tokenizer):
    ids = tokenizer.encode("😸", add_special_tokens=False)
    texts = texts_along(tokenizer, ids)
    assert texts[-1].strip() == "😸"
    assert not "".join(texts[:-1]).strip()


def test_an_alternative_in_the_middle_of_a_character_has_no_text(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("😸", add_special_tokens=False)
    assert TokenTexts(tokenizer)([], ids[0]) == ""


def test_special_tokens_are_shown(tokenizer):
    token = tokenizer.token_to_id("<|end|>")
    assert TokenTexts(tokenizer)([], token) == "<|end|>"
