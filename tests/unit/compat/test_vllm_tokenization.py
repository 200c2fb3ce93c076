"""`tokenization_kwargs` of prompts that are not text alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmllm.compat.vllm_tokenization import tokenize, tokenize_for_pooling
from shmllm.errors import RequestError

FRONT_END: Any = SimpleNamespace(info=SimpleNamespace(max_model_len=64))
IMAGE = {"prompt_token_ids": [5, 6, 7], "multi_modal_data": {"image": "a picture"}}


def test_token_ids_are_cut() -> None:
    given = {"truncate_prompt_tokens": 2}
    assert tokenize(FRONT_END, [5, 6, 7], given, min_room=1) == [{"prompt_token_ids": [6, 7]}]
    assert tokenize(FRONT_END, IMAGE, {"add_special_tokens": False}, min_room=1) == [IMAGE]


@pytest.mark.parametrize("kept", [2, 40, -1])
def test_prompts_with_items_are_not_cut(kept: int) -> None:
    with pytest.raises(RequestError, match="images or other items cannot be truncated"):
        tokenize(FRONT_END, [IMAGE], {"truncate_prompt_tokens": kept}, min_room=1)


def test_prompts_in_two_parts_are_not_cut() -> None:
    prompt = {"encoder_prompt": "a text", "decoder_prompt": None}
    with pytest.raises(RequestError, match="are for prompts in one part"):
        tokenize(FRONT_END, prompt, {"truncate_prompt_tokens": 2}, min_room=1)


def test_the_padding_that_texts_have_may_be_asked_for() -> None:
    pooling = SimpleNamespace(text_length=64)
    padded: Any = SimpleNamespace(info=SimpleNamespace(max_model_len=64, pooling=pooling))
    for given in ({"padding": "max_length"}, {"padding": "max_length", "max_length": 64}):
        assert tokenize_for_pooling(padded, ["a"], given) == (["a"], {})
    for given in ({"padding": "longest"}, {"padding": "max_length", "max_length": 32}):
        with pytest.raises(TypeError, match="padding"):
            tokenize_for_pooling(padded, ["a"], given)
    pooling.text_length = 0
    with pytest.raises(TypeError, match="padding"):
        tokenize_for_pooling(padded, ["a"], {"padding": "max_length"})
