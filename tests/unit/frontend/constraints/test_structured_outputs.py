"""grammar_of: the constraints that it accepts, and the error messages for all others."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest

from shmllm.errors import RequestError
from shmllm.frontend.constraints import structured_outputs
from shmllm.frontend.constraints.structured_outputs import HEADER, grammar_of
from shmllm.params.structured_outputs import StructuredOutputsParams


def chain_of_schemas(length: int) -> dict[str, Any]:
    links = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

REFUSED: list[tuple[dict[str, Any], str]] = [
    # JSON schemas: values that are no schema
    ({"json": '{"type"'}, "structured_outputs.json is no JSON schema: Expecting ':'"),
    ({"json": "3"}, "structured_outputs.json must be a JSON schema"),
    ({"json": []}, "structured_outputs.json must be a JSON schema"),
    ({"json": False}, "structured_outputs.json must be a JSON schema"),
    ({"json": ""}, "structured_outputs.json must be a non-empty str"),
    ({"json": int}, "structured_outputs.json is no JSON schema: Object of type type"),
    ({"json": {"const": float("nan")}}, "not JSON compliant"),
    ({"json": CIRCLE}, "Circular reference"),
    ({"json": "\ud800"}, "lone surrogate at character 0"),
    # JSON schemas: keywords
    ({"json": {"not": {}}}, "the keyword 'not', which cannot be enforced"),
    ({"json": {"if": {}}}, "the keyword 'if', which cannot be enforced"),
    ({"json": {"uniqueItems": True}}, "the keyword 'uniqueItems', which cannot be enforced"),
    ({"json": {"contentEncoding": "base64"}}, "'contentEncoding', which cannot be enforced"),
    ({"json": {"nullable": True}}, "'nullable', which cannot be enforced"),
    (
        {"json": {"minimun": 3}},
        "'minimun', which JSON Schema does not have; the nearest is 'minimum'",
    ),
    ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "'x-guidance'"),
    (
        {"json": {"properties": {"a": {"items": {"anyOf": [{}, {"contains": {}}]}}}}},
        "the keyword 'contains' at properties.a.items.anyOf[1], which",
    ),
    ({"json": {"$defs": {"a": {"invented": 1}}}}, "'invented' at $defs.a, which JSON Schema"),
    ({"json": {"patternProperties": {"^a": {"foo": 1}}}}, "'foo' at patternProperties.^a"),
    ({"json": {"items": [{}, {"foo": 1}]}}, "'foo' at items[1]"),
    ({"json": {"additionalProperties": {"foo": 1}}}, "'foo' at additionalProperties"),
    # JSON schemas: values
    ({"json": {"type": "strng"}}, "Invalid type: strng"),
    ({"json": {"enum": []}}, "Unsatisfiable schema"),
    ({"json": {"minLength": "a"}}, "Expected positive integer for 'minLength'"),
    ({"json": {"minItems": 3, "maxItems": 2, "type": "array"}}, "minItems (3) is greater"),
    ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
    ({"json": {"type": "string", "format": "foo"}}, "Unknown format: foo"),
    ({"json": {"$ref": "http://a/b"}}, "is not present in a registry"),
    ({"json": {"$ref": "#/$defs/b"}}, "'/$defs/b' does not exist"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "use anyOf"),
    # JSON schemas: sizes that would crash llguidance
    ({"json": chain_of_schemas(6_000)}, "more than 5,000 subschemas"),
    ({"json": nested(200)}, "recursion limit exceeded"),
    ({"json": nested(100_000)}, "nested too deeply"),
    # any JSON
    ({"json_object": False}, "structured_outputs.json_object must be True or left out"),
    ({"json_object": True, "whitespace_pattern": "("}, "whitespace_pattern: unclosed group"),
    ({"json_object": True, "whitespace_pattern": ""}, "whitespace_pattern must be a non-empty"),
    (
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "whitespace_pattern or disable_any_whitespace, not both",
    ),
    ({"regex": "a", "disable_any_whitespace": True}, "are for json and json_object"),
    # regular expressions
    ({"regex": 3}, "structured_outputs.regex must be a str, got 3"),
    ({"regex": "("}, "structured_outputs.regex: unclosed group"),
    ({"regex": "x{3,2}"}, "structured_outputs.regex: invalid repetition count range"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex: look-around"),
    ({"regex": r"(a)\1"}, "structured_outputs.regex: backreferences are not supported"),
    ({"regex": r"\bfoo"}, "structured_outputs.regex: lookarounds not supported"),
    ({"regex": r"[^\s\S]"}, "structured_outputs.regex: no text matches it"),
    ({"regex": "\ud800"}, "structured_outputs.regex is not valid Unicode"),
    # choices
    ({"choice": []}, "structured_outputs.choice must be a non-empty list of str, got []"),
    ({"choice": "abc"}, "structured_outputs.choice must be a non-empty list of str, got 'abc'"),
    ({"choice": ["a", ""]}, "structured_outputs.choice[1] must be a non-empty str, got ''"),
    ({"choice": ["a", 3]}, "structured_outputs.choice[1] must be a non-empty str, got 3"),
    ({"choice": ["\ud800"]}, "structured_outputs.choice[0] is not valid Unicode"),
    # grammars
    ({"grammar": ""}, "structured_outputs.grammar must be a non-empty str"),
    ({"grammar": 'root ::= "a'}, "structured_outputs.grammar line 1: cannot read"),
    ({"grammar": "root ::= root"}, "grammar line 1: no text of rule 'root' has an end"),
    ({"grammar": 'start: start "a"'}, "structured_outputs.grammar: no text matches it"),
    ({"grammar": "start: foo"}, 'structured_outputs.grammar: unknown name: "foo"'),
    ({"grammar": 'start: %json {"foo": 1}'}, "structured_outputs.grammar holds %json"),
    ({"grammar": '%llguidance {"x": 1}\nstart: "a"'}, "holds %llguidance options"),
    # structural tags
    ({"structural_tag": "{}"}, "structured_outputs.structural_tag has neither"),
    # the number of constraints
    ({}, "exactly one of json, regex"),
    ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
]


@pytest.mark.parametrize(
    ("fields", "message"), REFUSED, ids=[f"{next(iter(f), '')} {m[-30:]}" for f, m in REFUSED]
)
def test_constraints_that_cannot_be_enforced_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(StructuredOutputsParams(**fields))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class Model:
    """A class with the method that pydantic models have."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"type": "integer"}}, "title": "Model"}


class BrokenModel:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        raise TypeError("cannot describe this")


def schema_in(grammar: str) -> dict[str, Any]:
    header, _, text = grammar.partition("start: %json ")
    assert header == HEADER
    schema: dict[str, Any] = json.loads(text)
    return schema


@pytest.mark.parametrize(
    "given", [Model, Model.model_json_schema(), json.dumps(Model.model_json_schema())]
)
def test_a_schema_may_be_a_class_a_dict_or_text(given: Any) -> None:
    schema = schema_in(grammar_of(StructuredOutputsParams(json=given)))
    assert schema["properties"] == {"a": {"type": "integer"}}


def test_the_error_of_a_class_without_a_schema_contains_the_reason() -> None:
    with pytest.raises(RequestError, match="cannot describe this"):
        grammar_of(StructuredOutputsParams(json=BrokenModel))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c"},
        {
            "properties": {"not": {"type": "null"}, "invented": True}
        },  # names of properties, not keywords
        {"enum": [{"not": 1}], "default": {"invented": 2}},
        {"const": {"if": 1}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer"},
        {"type": ["string", "null"], "pattern": "^a", "format": "uuid"},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        {
            "discriminator": {"propertyName": "k", "mapping": {"a": "#/$defs/A"}},
            "oneOf": [
                {"properties": {"k": {"const": name}}, "required": ["k"], "type": "object"}
                for name in "ab"
            ],
        },
        chain_of_schemas(2_400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_that_can_be_enforced_are_accepted(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert schema_in(grammar_of(StructuredOutputsParams(json=schema))).items() >= schema.items()
    assert json.dumps(schema) == before


def test_disable_additional_properties_closes_objects() -> None:
    given = {
        "properties": {"a": {"properties": {"b": True}}, "c": {"additionalProperties": True}},
        "$defs": {"d": {"patternProperties": {"x": True}}},
    }
    grammar = grammar_of(StructuredOutputsParams(json=given, disable_additional_properties=True))
    schema = schema_in(grammar)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"]["additionalProperties"] is False
    assert schema["properties"]["c"] == {"additionalProperties": True}
    assert schema["$defs"]["d"]["additionalProperties"] is False
    assert "additionalProperties" not in given


def test_a_pattern_that_only_matches_properties_becomes_part_of_them() -> None:
    inner = {
        "properties": {"a": {"type": "null"}, "ab": True, 'c"d': {}},
        "patternProperties": {"^ab?$": {"title": "x"}, '^"': {}, "^b": {}, '^c"d$': {"enum": [1]}},
    }
    schema = schema_in(grammar_of(StructuredOutputsParams(json={"items": inner})))["items"]
    assert schema["patternProperties"] == {'^"': {}, "^b": {}}
    assert schema["properties"] == {
        "a": {"allOf": [{"type": "null"}, {"title": "x"}]},
        "ab": {"allOf": [True, {"title": "x"}]},
        'c"d': {"allOf": [{}, {"enum": [1]}]},
    }
    closed = {"properties": {"a": {}}, "patternProperties": {"^a$": {}}}
    assert "patternProperties" not in schema_in(grammar_of(StructuredOutputsParams(json=closed)))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "patternProperties": {"(": {}}},
        {"properties": {"a": {}}, "patternProperties": []},
        {"properties": [], "patternProperties": {"a": {}}},
        {"properties": {"a": 3}, "patternProperties": {"^a$": {}}},
    ],
)
def test_wrong_patterns_are_found(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.json: "):
        grammar_of(StructuredOutputsParams(json=schema))


def test_the_schema_contains_the_whitespace_option() -> None:
    for fields, expected in (
        ({}, {"whitespace_pattern": structured_outputs.BLANKS}),
        ({"disable_any_whitespace": True}, {"whitespace_flexible": False}),
        ({"whitespace_pattern": " ?"}, {"whitespace_pattern": " ?"}),
    ):
        grammar = grammar_of(StructuredOutputsParams(json_object=True, **fields))
        assert schema_in(grammar)["x-guidance"] == expected


def test_equal_choices_are_merged() -> None:
    assert (
        grammar_of(StructuredOutputsParams(choice=["b", "a", "b"])) == f'{HEADER}start: "b" | "a"'
    )


def test_a_grammar_with_names_of_tokens_is_not_checked_in_the_front_end() -> None:
    lark = "start: <|im_end|>"
    assert grammar_of(StructuredOutputsParams(grammar=lark)) == HEADER + lark


def test_equal_constraints_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = structured_outputs._compile_for_bytes

    def count(grammar: str) -> str:
        checked.append(grammar)
        return real(grammar)

    monkeypatch.setattr(structured_outputs, "_compile_for_bytes", count)
    for _ in range(3):
        grammar_of(StructuredOutputsParams(regex="only here [0-9]"))
    assert checked == [f"{HEADER}start: /only here [0-9]/"]


def test_a_check_that_does_not_terminate_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(structured_outputs, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(structured_outputs, "_compile_for_bytes", lambda _: str(done.wait()))
    with pytest.raises(RequestError, match="too large"):
        grammar_of(StructuredOutputsParams(regex="never checked"))
    done.set()


def test_a_thread_with_a_small_stack_can_check_a_deep_grammar() -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(1_900))
    grammar = f'root ::= r0\n{rules}\nr1900 ::= "a"'
    outcome: list[str] = []
    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(
            target=lambda: outcome.append(grammar_of(StructuredOutputsParams(grammar=grammar)))
        )
        thread.start()
        thread.join()
        assert threading.stack_size() == 256 * 1024
    finally:
        threading.stack_size(before)
    assert outcome
    assert outcome[0].startswith(f"{HEADER}start: T0")


def test_without_llguidance_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance._lib", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        grammar_of(StructuredOutputsParams(regex="not checked before"))
