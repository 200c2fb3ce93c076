"""Forced calls: what structural tags of all formats allow is what the parsers read again."""

import json
import random

import pytest
from llguidance import LLMatcher
from support.variants import each_once

from shmllm.errors import RequestError
from shmllm.frontend.constraints.structured_outputs import _byte_tokenizer, grammar_of
from shmllm.frontend.replies.formats import ReplyFormat
from shmllm.frontend.replies.registry import TOOL_PARSERS
from shmllm.params.structured_outputs import StructuredOutputsParams

FORCED_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "it's"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                    "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
                    "hourly": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
                "required": ["days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
FORCED_TOOLS[1]["function"]["parameters"] |= {"properties": {}, "additionalProperties": False}


def is_allowed(name, arguments):
    if name == "time":
        return arguments == {}
    return (
        name == "weather"
        and {"days"} <= arguments.keys() <= {"city", "days", "units", "hourly"}
        and arguments["days"] in range(10)
        and arguments.get("city", "Oslo") in ("Oslo", "it's")
        and arguments.get("hourly") in (None, True, False)
        and len(arguments.get("units", [])) <= 2
        and set(arguments.get("units", [])) <= {"C", "F"}
    )


def random_output(form, seed):
    """A text that a structural tag allows, with few blanks."""
    draw = random.Random(seed)
    grammar = grammar_of(
        StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    )
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    output = bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [each for each in range(257) if mask[each // 8] >> each % 8 & 1]
        blanks = [each for each in allowed if each in (*b" \t\r\n",)]
        others = [each for each in allowed if each not in blanks]
        is_blank = not others or (blanks and draw.random() < 0.1)
        token = draw.choice(blanks if is_blank else others)
        assert matcher.consume_token(token)
        if token < 256:
            output.append(token)
    return output.decode()


@pytest.mark.parametrize(
    ("parser", "has_one"), each_once(list(dict.fromkeys(TOOL_PARSERS.values())), [True, False])
)
def test_a_forced_call_is_read_again(parser, has_one):
    found = set()
    for seed in range(5):
        text = random_output(parser.forced(FORCED_TOOLS, has_one), seed)
        reply = ReplyFormat(None, parser, FORCED_TOOLS).parser().parse(text)
        assert reply.content == "", text
        assert reply.tool_calls
        assert len(reply.tool_calls) == 1 or not has_one
        for call in reply.tool_calls:
            assert is_allowed(call.function.name, json.loads(call.function.arguments)), text
            found.add(call.function.name)
    assert found == {"weather", "time"}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"$ref": "#/$defs/x"}, r"\$ref"),
        ({"allOf": [{}]}, "allOf"),
        ({"oneOf": [{}]}, "oneOf"),
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {}, "minProperties": 1}, "minProperties"),
        ({"anyOf": [{"type": "integer"}], "maximum": 3}, "anyOf"),
        ({"type": "integer", "enum": [1], "maximum": 3}, "enum"),
    ],
)
def test_what_gemma_cannot_enforce_is_refused_by_name(schema, keyword):
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    with pytest.raises(RequestError, match=f"parameters of 'f' have '{keyword}', which the model"):
        TOOL_PARSERS["gemma4"].forced([tool], True)
    assert "json_schema" in str(TOOL_PARSERS["lfm2"].forced([tool], True))


@pytest.mark.parametrize("name", ["gemma4", "lfm2", "glm47"])
def test_further_keywords_of_parameters_are_refused_by_name(name):
    tool = {"function": {"name": "f", "parameters": {"properties": {}, "minProperties": 1}}}
    with pytest.raises(RequestError, match="parameters of 'f' have 'minProperties', which"):
        TOOL_PARSERS[name].forced([tool], True)


@pytest.mark.parametrize("name", ["gemma4", "lfm2"])
@pytest.mark.parametrize("parameters", [5, {"properties": 5}, {"properties": {"x": 5}}])
def test_malformed_parameters_are_one_error(name, parameters):
    tool = {"function": {"name": "f", "parameters": parameters}}
    with pytest.raises(
        RequestError, match="parameters of 'f' must be the JSON schema of an object"
    ):
        TOOL_PARSERS[name].forced([tool], True)


def test_a_forced_call_of_lfm2_has_the_blanks_of_its_template():
    form = TOOL_PARSERS["lfm2"].forced(FORCED_TOOLS, False)
    grammar = grammar_of(
        StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    )
    calls = "weather(city='Oslo', days=2, hourly=None), time()"
    text = f"<|tool_call_start|>[{calls}]<|tool_call_end|>".encode()
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    assert matcher.try_consume_tokens(list(text)) == len(text)
    assert matcher.is_accepting()


def test_values_without_a_type_may_be_of_several():
    parameters = {"properties": {"y": {"type": ["integer", "null"]}}, "required": ["x"]}
    tool = {"function": {"name": "f", "parameters": parameters}}
    for name in ("gemma4", "lfm2"):
        parser = TOOL_PARSERS[name]
        kinds = set()
        for seed in range(20):
            [call] = (
                parser([tool]).parse(random_output(parser.forced([tool], True), seed)).tool_calls
            )
            arguments = json.loads(call.function.arguments)
            assert {"x"} <= arguments.keys() <= {"x", "y"}
            kinds.add(type(arguments["x"]))
        assert len(kinds) > 2
