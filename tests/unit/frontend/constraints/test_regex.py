"""The translation of regular expressions: Python's `re` matches everything that it matches."""

from __future__ import annotations

import re

import pytest

from shmllm.errors import RequestError
from shmllm.frontend.constraints.json_schema import translate_patterns
from shmllm.frontend.constraints.regex import to_library, to_library_classes
from shmllm.frontend.constraints.structured_outputs import grammar_of
from shmllm.params.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d\w\s", r"[0-9][0-9A-Za-z_][\x20\t\n\r\f\v]"),
        (r"\D\W\S", r"\D[^\w\p{N}][^\s\x1c-\x1f]"),
        (r"[\d.]", "[0-9.]"),
        (r"[^\d.]", r"[^\d.]"),
        (r"\\d[\\d]", r"\\d[\\d]"),
        (r"\<a\>[\<]", "<a>[<]"),
        (r"a\Z", r"a\z"),
        (r"[\W\S]", r"[[^\w\p{N}][^\s\x1c-\x1f]]"),
        (r"[^\w\W\D]", r"[^\w\p{N}[^0-9A-Za-z_][^0-9]]"),
        ("[]a]", r"[\]a]"),
        ("[^]a]", r"[^\]a]"),
        (r"[--\<]", r"[\--<]"),
        ("[]-a]", r"[\]-a]"),
        (r"[\w-]", r"[0-9A-Za-z_\-]"),
        (r"[\w-a]", r"[\w-a]"),
        ("[^^ --]", r"[^\^\x20-\-]"),
        (r'{"a": \d{2}}', r'\{"a": [0-9]{2}}'),
        ("a{,2}b{,}{}", r"a{0,2}b{0,}\{}"),
        (r"\101\0[\07\b]\1", r"\x41\x00[\x07\x08]\1"),
        (r"\p{L}\x{41}", r"\p{L}\x{41}"),
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
    "{a}", "9",
]  # fmt: skip
NOT_OF_ASCII_CLASSES = ["\x1f", "\u2495", "\u0317", "\u06f2"]  # separator, number, mark, digit


@pytest.mark.filterwarnings(
    "ignore:Possible"
)  # `re` warns about set operators of llguidance's dialect
@pytest.mark.parametrize(
    "pattern",
    [
        r"\d+", r"\w+", r"\s", r"\D", r"\W", r"\S+", r"[\d.]+", r"[^\d]", r"[^\w]", r"[\w-]+",
        "[[]", "[]]", "[^]]", "[&&]", "[~~a]", r"\<b\>", r"[\<\>]", r"a\Z", "^a$", "^a|b$", "(?i)a",
        "a?b?", r"\\", r"[\\d]", ".", "(?s:.)", r"\d+\.\d{1,2}", r"[\w.]+@\w+\.com", r"[\^]",
        "(?P<x>a)(?:b)?", r"[--\<]", "[]-a]", r"[^--\<]", r"[\W1]+", r"[^\W]", r"[^\S\d]", r"[^\D]",
        r"(?x:[ a])", "{a}", "a{,1}", r"\1014?|\0",
    ],
)  # fmt: skip
def test_the_translation_matches_all_ascii_texts_that_python_matches_and_no_others(
    pattern: str,
) -> None:
    python = [text for text in CANDIDATES if re.fullmatch(pattern, text)]
    ours = matching_texts(pattern, CANDIDATES)
    assert set(ours) <= set(python)
    others = matching_texts(pattern, NOT_OF_ASCII_CLASSES)
    assert [text for text in others if not re.fullmatch(pattern, text)] == []
    assert [text for text in ours if text.isascii()] == [
        text for text in python if text.isascii() and not (text == "a\n" and "$" in pattern)
    ]


@pytest.mark.parametrize("pattern", ["a*+b", "a{2}+", "(a|b)?+a", "[+]++"])
def test_possessive_repetitions_are_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="possessive"):
        grammar_of(StructuredOutputsParams(regex=pattern))


def test_patterns_of_json_schemas_have_no_set_operators() -> None:
    from llguidance import LLMatcher

    from shmllm.frontend.constraints.structured_outputs import _byte_tokenizer

    for pattern, text, is_match in [
        (r"^[^[\]]+$", "a&", True),
        ("^[a[b]$", "[", True),
        ("^[a[b]+$", "c", False),
        ("^[a-d&&b]$", "&", True),
        (r"^\<b\>$", "<b>", True),
        (r"^\w+\s[\d]$", "a 1", True),
        (r"^\W$", "é", True),  # unlike those of `regex`
        (r"^\w$", "é", False),
    ]:
        for schema, document in [
            ({"type": "string", "pattern": pattern}, f'"{text}"'),
            (
                {"type": "object", "patternProperties": {pattern: {}}}
                | {"additionalProperties": False},
                f'{{"{text}":1}}',
            ),
        ]:
            grammar = grammar_of(StructuredOutputsParams(json=schema))
            matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
            found = matcher.try_consume_tokens(list(document.encode()))
            assert (found == len(document.encode())) is is_match, (pattern, document)


def test_patterns_that_become_equal_are_both_kept() -> None:
    schema = {"patternProperties": {"[[]": {"minimum": 1}, r"[\[]": {"maximum": 2}}}
    translate_patterns(schema, to_library_classes)
    both = {"allOf": [{"minimum": 1}, {"maximum": 2}]}
    assert schema == {"patternProperties": {r"[\[]": both}}
