"""What llguidance takes in a JSON schema and does not enforce is refused or avoided."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from shmllm.errors import RequestError
from shmllm.frontend.constraints.structured_outputs import _byte_tokenizer, grammar_of
from shmllm.params.structured_outputs import StructuredOutputsParams

LOWEST = -(2**63)


def grammar(schema: dict[str, Any]) -> str:
    return grammar_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True))


def is_possible(schema: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(_byte_tokenizer(), grammar(schema), log_level=0)
    num_bytes = len(text.encode())
    return bool(matcher.try_consume_tokens(list(text.encode())) == num_bytes)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 1234567890123456789}, "1234567890123456789 at const"),
        ({"const": 2**53 + 1}, "at const"),
        ({"const": 10**400 + 1}, "at const"),
        ({"enum": [1, {"a": [LOWEST - 1]}]}, "at enum"),
        ({"properties": {"a": {"const": 123456789.12345679}}}, "at properties.a.const"),
        ({"type": "integer", "minimum": 2**53 + 1}, "at minimum"),
        ({"type": "integer", "exclusiveMaximum": 2**62 + 1}, "at exclusiveMaximum"),
    ],
)
def test_numbers_that_would_be_written_as_others_are_refused(
    schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(RequestError, match=f"the number .*{place}, which has more digits"):
        grammar(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LOWEST},
        {"enum": ["a", [LOWEST]]},
        {"type": "integer", "minimum": LOWEST, "maximum": LOWEST},
        {"allOf": [{"type": "integer", "minimum": LOWEST}, {"maximum": LOWEST}]},
    ],
)
def test_the_lowest_integer_of_64_bits_does_not_end_the_process(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="more digits"):
        grammar(schema)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**53, str(2**53)),
        (2**63 - 1, str(2**63 - 1)),
        (10**25, "1" + "0" * 25),
        (0.1 + 0.2, "0.30000000000000004"),
        (-314159.2653589793, "-314159.2653589793"),
        (True, "true"),
    ],
)
def test_long_numbers_that_are_written_as_they_are_remain_possible(value: Any, text: str) -> None:
    assert is_possible({"const": value}, text)


def test_an_integer_may_have_64_bits() -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    assert is_possible(schema, str(2**63 - 1))
    assert not is_possible(schema, str(2**63))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {
            "type": "object",
            "required": ["a"],
            "properties": {"a": False},
            "additionalProperties": {"type": "string"},
        },
    ],
)
def test_an_escaped_letter_does_not_make_a_listed_name_another_one(schema: dict[str, Any]) -> None:
    schema = {"anyOf": [schema, {"type": "null"}]}
    assert not is_possible(schema, r'{"\u0061":"x"')


def test_control_characters_are_possible_in_other_schemas() -> None:
    assert is_possible({"const": "\x01"}, r'"\u0001"')
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    assert is_possible(closed, r'{"a":"\u0001\n"}')
    assert is_possible({"type": "object"}, r'{"\u0001":1}')


@pytest.mark.parametrize(
    ("least", "required", "allowed"),
    [(0, [], True), (1, [], True), (2, [], False), (2, ["a"], True), (3, ["a"], False)],
)
def test_a_least_number_of_properties_that_equal_names_could_reach_is_refused(
    least: int, required: list[str], allowed: bool
) -> None:
    schema = {"type": "object", "minProperties": least, "required": required}
    if allowed:
        grammar(schema)
        return
    with pytest.raises(RequestError, match=f"the value {least} at minProperties, .*further names"):
        grammar(schema)
