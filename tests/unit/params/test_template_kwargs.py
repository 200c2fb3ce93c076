"""`chat_template_kwargs` together with the options of a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from shmllm.errors import RequestError
from shmllm.params.template_kwargs import with_template_kwargs

OPTIONS = {"tools": None, "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, OPTIONS),
        ({}, OPTIONS),
        ({"x": 1, "self": 2}, {**OPTIONS, "x": 1, "self": 2}),
        ({"add_generation_prompt": False}, {"tools": None, "add_generation_prompt": False}),
    ],
)
def test_what_is_given_has_precedence(given: Any, expected: dict[str, Any]) -> None:
    assert with_template_kwargs(OPTIONS, given) == expected
    assert OPTIONS == {"tools": None, "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "chat_template_kwargs must be a dict, got int"),
        ([("x", 1)], "chat_template_kwargs must be a dict, got list"),
        ({1: 2}, "a name in chat_template_kwargs must be a str, got 1"),
        ({"messages": []}, "chat_template_kwargs cannot have 'messages'"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        with_template_kwargs(OPTIONS, given)
