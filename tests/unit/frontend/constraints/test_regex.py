"""The translation of regular expressions: Python's `re` matches everything that it matches."""

from __future__ import annotations

import re

import pytest

from shmllm.frontend.constraints.regex import to_library
from shmllm.frontend.constraints.structured_outputs import grammar_of
from shmllm.params.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d\w\s", r"[0-9][0-9A-Za-z_][\x20\t\n\r\f\v]"),
        (r"\D\W\S", r"\D\W\S"),
        (r"[\d.]", "[0-9.]"),
        (r"[^\d.]", r"[^\d.]"),
        (r"\\d[\\d]", r"\\d[\\d]"),
        (r"\<a\>[\<]", "<a>[<]"),
        (r"a\Z", r"a\z"),
        ("[]a]", "[]a]"),
        ("[^]a]", "[^]a]"),
        ("[a[&&~b]", r"[a\[\&\&\~b]"),
        ("[unclosed", "[unclosed"),
        ("ends in \\", "ends in \\"),
        (r"(?i)x|y{2,3}?[a-z]", r"(?i)x|y{2,3}?[a-z]"),
    ],
)
def test_differences_between_the_dialects_are_translated(pattern: str, expected: str) -> None:
    assert to_library(pattern) == expected


def matching_texts(pattern: str, candidates: list[str]) -> list[str]:
    """The candidates that the compiled grammar accepts, byte by byte."""
    from llguidance import LLMatcher

    from shmllm.frontend.constraints.structured_outputs import _byte_tokenizer

    grammar = grammar_of(StructuredOutputsParams(regex=pattern))
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    accepted = []
    for text in candidates:
        own = matcher.deep_copy()
        if own.consume_tokens(list(text.encode())) and own.is_accepting():
            accepted.append(text)
    return accepted


CANDIDATES = [
    "", "a", "b", "ab", "7", "42", "٣", "é", "_", "-", "a-1", " ", "\t", "\u00a0", "\n", "[", "&",
    "~", "<", ">", "<b>", "]", "^", "\\", "d", "A", "abc", "a\n", "1.5", "10.25", "x@y.com",
]  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:Possible"
)  # `re` warns about set operators of llguidance's dialect
@pytest.mark.parametrize(
    "pattern",
    [
        r"\d+", r"\w+", r"\s", r"\D", r"\W", r"\S+", r"[\d.]+", r"[^\d]", r"[^\w]", r"[\w-]+",
        "[[]", "[]]", "[^]]", "[&&]", "[~~a]", r"\<b\>", r"[\<\>]", r"a\Z", "^a$", "^a|b$", "(?i)a",
        "a?b?", r"\\", r"[\\d]", ".", "(?s:.)", r"\d+\.\d{1,2}", r"[\w.]+@\w+\.com", r"[\^]",
        "(?P<x>a)(?:b)?",
    ],
)  # fmt: skip
def test_the_translation_matches_all_ascii_texts_that_python_matches_and_no_others(
    pattern: str,
) -> None:
    python = [text for text in CANDIDATES if re.fullmatch(pattern, text)]
    ours = matching_texts(pattern, CANDIDATES)
    assert set(ours) <= set(python)
    assert [text for text in ours if text.isascii()] == [
        text for text in python if text.isascii() and not (text == "a\n" and "$" in pattern)
    ]
