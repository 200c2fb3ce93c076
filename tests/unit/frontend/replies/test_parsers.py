"""Parsers of replies: what they find in whole texts, and the same however a text is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.replies import OSLO, TOOLS, parsed_in_pieces, parts

from shmllm.frontend.replies.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from shmllm.frontend.replies.glm import Glm45Parser, Glm47Parser
from shmllm.frontend.replies.harmony import HarmonyParser
from shmllm.frontend.replies.hermes import HermesParser
from shmllm.frontend.replies.kimi import KimiK2Parser
from shmllm.frontend.replies.llama3 import Llama3Parser
from shmllm.frontend.replies.minimax import MiniMaxM2Parser
from shmllm.frontend.replies.mistral import MistralParser
from shmllm.frontend.replies.parser import TwoParsers
from shmllm.frontend.replies.qwen3_coder import Qwen3CoderParser
from shmllm.frontend.replies.seed_oss import SeedOssParser, SeedOssReasoning
from shmllm.frontend.replies.think import DeepSeekR1Parser, MagistralParser, ThinkParser
from shmllm.outputs.reply import Reply

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM45 = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
GLM47 = GLM45.replace("\n", "")
KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{OSLO}<|tool_call_end|>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
)
SEED = (
    "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>"
)
BEGIN, SEP, END = (
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁sep\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
)
V3 = f"{BEGIN}function{SEP}weather\n```json\n{OSLO}\n```{END}"
V31 = f"{BEGIN}weather{SEP}{OSLO}{END}"


def deepseek(calls):
    return f"<\uff5ctool▁calls▁begin\uff5c>{calls}<\uff5ctool▁calls▁end\uff5c>"


THINK = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + OSLO
CALLS = [("weather", OSLO)]

# name: (parser, text, (reasoning, content, calls))
CASES = {
    "think": (ThinkParser, "<think>\nHm.\n</think>\n\nYes.\n", ("Hm.", "Yes.\n", [])),
    "think, blanks first": (ThinkParser, "\n<think>a b</think>c", ("a b", "c", [])),
    "think, empty": (ThinkParser, "<think>\n\n</think>\n\nYes", ("", "Yes", [])),
    "think, no end": (ThinkParser, "<think>\nHm. </th", ("Hm. </th", "", [])),
    "think, none": (ThinkParser, " No <think>a</think>", ("", " No <think>a</think>", [])),
    "think, part of a mark": (ThinkParser, "<thi", ("", "<thi", [])),
    "think, blanks": (ThinkParser, " \n ", ("", " \n ", [])),
    "think, open": (lambda: ThinkParser(True), "Hm.\n</think>\nYes", ("Hm.", "Yes", [])),
    "think, open without end": (lambda: ThinkParser(True), "Hm. ", ("Hm. ", "", [])),
    "r1": (lambda: DeepSeekR1Parser(True), "Hm.</think>Yes", ("Hm.", "Yes", [])),
    "magistral": (MagistralParser, "[THINK]Hm.[/THINK]Yes", ("Hm.", "Yes", [])),
    "hermes": (HermesParser, f"I look.\n{HERMES}", ("", "I look.", CALLS)),
    "hermes, two": (HermesParser, f"{HERMES}\n{HERMES} \n", ("", "", CALLS * 2)),
    "hermes, text behind": (HermesParser, f"{HERMES}\nSo.\n", ("", "So.\n", CALLS)),
    "hermes, no end": (HermesParser, HERMES[:-13], ("", "", CALLS)),
    "hermes, cut off": (HermesParser, f"a \n{HERMES[:40]}", ("", f"a \n{HERMES[:40]}", [])),
    "hermes, no JSON": (
        HermesParser,
        "<tool_call>weather</tool_call> x",
        ("", "<tool_call>weather</tool_call> x", []),
    ),
    "hermes, no name": (
        HermesParser,
        "<tool_call>[1]</tool_call>",
        ("", "<tool_call>[1]</tool_call>", []),
    ),
    "hermes, none": (HermesParser, "2 < 3 <tool", ("", "2 < 3 <tool", [])),
    "hermes, no arguments": (
        HermesParser,
        '<tool_call>{"name": "time"}</tool_call>',
        ("", "", [("time", "{}")]),
    ),
    "hermes, accents": (
        HermesParser,
        '<tool_call>{"name": "weather", "arguments": {"city": "Malm\\u00f6"}}</tool_call>',
        ("", "", [("weather", '{"city": "Malmö"}')]),
    ),
    "coder": (lambda: Qwen3CoderParser(TOOLS), f"I look.\n{CODER}", ("", "I look.", CALLS)),
    "coder, JSON and lines": (
        lambda: Qwen3CoderParser(TOOLS),
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n13\n</parameter>\n"
        '<parameter=units>\n["C"]\n</parameter>\n</function>\n</tool_call>',
        ("", "", [("weather", '{"city": "12\\n13", "units": ["C"]}')]),
    ),
    "coder, no parameters": (
        lambda: Qwen3CoderParser(TOOLS),
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
        ("", "", [("time", "{}")]),
    ),
    "coder, no call": (
        Qwen3CoderParser,
        "<tool_call>\n<function=time>\n<x>\n</function></tool_call>",
        ("", "<tool_call>\n<function=time>\n<x>\n</function></tool_call>", []),
    ),
    "glm": (lambda: Glm45Parser(TOOLS), f"I look.\n{GLM45}\n", ("", "I look.", CALLS)),
    "glm, two": (lambda: Glm45Parser(TOOLS), f"{GLM45}\n{GLM45}", ("", "", CALLS * 2)),
    "glm 4.7": (lambda: Glm47Parser(TOOLS), f"I look.{GLM47}{GLM47}", ("", "I look.", CALLS * 2)),
    "glm, strings and JSON": (
        lambda: Glm47Parser(TOOLS),
        "<tool_call>weather<arg_key>city</arg_key><arg_value>12\n</arg_value>"
        '<arg_key>units</arg_key><arg_value>["C"]</arg_value></tool_call>',
        ("", "", [("weather", '{"city": "12\\n", "units": ["C"]}')]),
    ),
    "glm, no parameters": (
        lambda: Glm45Parser(TOOLS),
        "<tool_call>time\n</tool_call>",
        ("", "", [("time", "{}")]),
    ),
    "glm, no end": (lambda: Glm45Parser(TOOLS), GLM45[:-12], ("", GLM45[:-12], [])),
    "glm, cut off": (lambda: Glm45Parser(TOOLS), GLM45[:14], ("", GLM45[:14], [])),
    "glm, JSON": (Glm45Parser, HERMES, ("", HERMES, [])),
    "kimi": (
        KimiK2Parser,
        f"I look.<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>",
        ("", "I look.", CALLS),
    ),
    "kimi, two": (
        KimiK2Parser,
        f"<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>",
        ("", "", CALLS * 2),
    ),
    "minimax": (lambda: MiniMaxM2Parser(TOOLS), f"I look.\n{MINIMAX}", ("", "I look.", CALLS)),
    "minimax, two in one": (
        lambda: MiniMaxM2Parser(TOOLS),
        MINIMAX.replace("</invoke>", '</invoke>\n<invoke name="time"></invoke>'),
        ("", "", [*CALLS, ("time", "{}")]),
    ),
    "minimax, none": (
        MiniMaxM2Parser,
        "<minimax:tool_call>\n</minimax:tool_call>",
        ("", "<minimax:tool_call>\n</minimax:tool_call>", []),
    ),
    "seed": (lambda: SeedOssParser(TOOLS), f"I look.\n{SEED}", ("", "I look.", CALLS)),
    "seed, reasoning": (SeedOssReasoning, "<seed:think>Hm.</seed:think>\nYes", ("Hm.", "Yes", [])),
    "llama": (
        Llama3Parser,
        '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}',
        ("", "", CALLS),
    ),
    "llama, two": (
        Llama3Parser,
        ' <|python_tag|>{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}; '
        '{"name": "time", "arguments": {}}',
        ("", "", [*CALLS, ("time", "{}")]),
    ),
    "llama, other JSON": (Llama3Parser, '{"city": "Oslo"}', ("", '{"city": "Oslo"}', [])),
    "llama, code": (Llama3Parser, "<|python_tag|>f()", ("", "<|python_tag|>f()", [])),
    "llama, text": (Llama3Parser, 'It is {"name": "x"}', ("", 'It is {"name": "x"}', [])),
    "llama, part of a mark": (Llama3Parser, " <|py", ("", " <|py", [])),
    "mistral": (
        MistralParser,
        f'I look.[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}]',
        ("", "I look.", CALLS),
    ),
    "mistral, names": (
        MistralParser,
        f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{{}}",
        ("", "", [*CALLS, ("time", "{}")]),
    ),
    "mistral, none": (MistralParser, "[TOOL_CALLS]x", ("", "[TOOL_CALLS]x", [])),
    "deepseek": (DeepSeekV3Parser, f"So.{deepseek(V3 + chr(10) + V3)}", ("", "So.", CALLS * 2)),
    "deepseek 3.1": (DeepSeekV31Parser, deepseek(V31 + V31), ("", "", CALLS * 2)),
    "deepseek, none": (DeepSeekV31Parser, deepseek("x"), ("", deepseek("x"), [])),
    "harmony": (
        HarmonyParser,
        THINK.format("Hm. ") + "<|channel|>final<|message|>Yes.\n",
        ("Hm.", "Yes.\n", []),
    ),
    "harmony, call": (HarmonyParser, THINK.format("Hm.") + CALL, ("Hm.", "", CALLS)),
    "harmony, preamble and calls": (
        HarmonyParser,
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>"
        f"<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{{}}",
        ("", "I look.", [*CALLS, ("time", "{}")]),
    ),
    "harmony, two analyses": (
        HarmonyParser,
        THINK.format("a") + THINK.format("b") + "<|channel|>final<|message|>c",
        ("a\nb", "c", []),
    ),
    "harmony, cut off": (HarmonyParser, CALL[:-3], ("", OSLO[:-3], [])),
    "harmony, header alone": (HarmonyParser, "<|channel|>ana", ("", "", [])),
    "harmony, plain text": (HarmonyParser, "Hello. ", ("", "Hello. ", [])),
    "harmony without calls": (lambda: HarmonyParser(has_calls=False), CALL, ("", OSLO, [])),
    "harmony without reasoning": (
        lambda: HarmonyParser(has_reasoning=False),
        THINK.format("a"),
        ("", "a", []),
    ),
    "both": (
        lambda: TwoParsers(ThinkParser(), HermesParser()),
        f"<think>{HERMES}</think>\n\nI look.\n{HERMES}",
        (HERMES, "I look.", CALLS),
    ),
    "both, llama": (
        lambda: TwoParsers(ThinkParser(True), Llama3Parser()),
        'Hm.</think>\n\n{"name": "time", "parameters": {}}',
        ("Hm.", "", [("time", "{}")]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_text_has_these_parts(name):
    make, text, expected = CASES[name]
    assert parts(make().parse(text)) == expected


@pytest.mark.parametrize("name", CASES)
def test_each_cut_in_two_gives_the_same_and_so_do_single_characters(name):
    make, text, expected = CASES[name]
    for at in range(len(text) + 1):
        assert parsed_in_pieces(make(), [text[:at], text[at:]]) == expected, text[:at]
    assert parsed_in_pieces(make(), text) == expected


PIECES = ["<", "<think>", "</think>", "\n", " ", "a", "{", "}", "<tool_call>", "</tool_call>"]
PIECES += ['{"name": "f"}', "[TOOL_CALLS]", "<|python_tag|>", "<|channel|>", "<|message|>"]
PIECES += ["<|end|>", "analysis", "[", "]", ";", BEGIN, SEP, END, "x\n```json\n{}\n```"]
PIECES += ["<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>", "to=f"]


@pytest.mark.parametrize(
    "name", ["think", "both", "llama", "mistral", "deepseek", "harmony", "coder"]
)
@given(data=st.data())
def test_any_text_has_the_same_parts_however_it_is_cut(name, data):
    make = CASES[name][0]
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert parsed_in_pieces(make(), pieces) == parts(make().parse(text))


@given(st.text(alphabet="<>tol_cahin/ \n", max_size=30))
@example("<tool_call")
def test_a_text_without_marks_is_content_as_it_is(text):
    reply = TwoParsers(ThinkParser(), HermesParser()).parse(text)
    assert reply == Reply(content=text)


def test_calls_have_ids_of_nine_letters_and_digits_and_openais_shape():
    first, second = HermesParser().parse(HERMES * 2).tool_calls
    assert first.id != second.id
    assert len(first.id) == 9
    assert first.id.isalnum()
    assert json.loads(json.dumps(second.as_dict())) == {
        "id": second.id,
        "type": "function",
        "function": {"name": "weather", "arguments": OSLO},
    }


def test_calls_of_kimi_have_the_ids_that_the_model_wrote():
    calls = f"{KIMI}{KIMI.replace('weather:0', 'time:1')}"
    reply = KimiK2Parser().parse(f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
    assert [call.id for call in reply.tool_calls] == ["functions.weather:0", "functions.time:1"]
    assert [call.index for call in reply.tool_calls] == [0, 1]


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("None", OPTIONAL, None),
        ("null", {"type": ["string", "null"]}, None),
        ("42", OPTIONAL, "42"),
        ("42", {"oneOf": [{"type": "string"}, {"type": "number"}]}, 42),
        ("1.5", {"type": ["number", "string"]}, 1.5),
        ("[1", {"type": "array"}, "[1"),
        ("[{'a': None}]", {"type": "array"}, [{"a": None}]),
        ("{1: {2}}", {"type": "object"}, "{1: {2}}"),
        ("1, 2", {"type": "array"}, "1, 2"),
        ("None", {"type": "string"}, "None"),
        ("None", {"enum": ["None", "Full"]}, "None"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": ["a", 1]}, 1),
        ("1", {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}, 1),
        ("True", {}, True),
        ('{"a": null}', None, {"a": None}),
        ("Oslo", None, "Oslo"),
    ],
)
def test_a_parameter_of_qwen3_coder_has_a_type_of_its_schema(text, schema, value):
    properties = {} if schema is None else {"x": schema}
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    reply = Qwen3CoderParser([tool]).parse(
        f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    [call] = reply.tool_calls
    found = json.loads(call.function.arguments)["x"]
    assert (found, type(found)) == (value, type(value))


WEATHER_OF = '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>'
FORMATS_OF_JSON = {
    "hermes": (HermesParser, WEATHER_OF),
    "llama3": (Llama3Parser, '{"name": "f", "parameters": {"x": %s}}'),
    "mistral": (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {"x": %s}}]'),
    "mistral with names": (MistralParser, '[TOOL_CALLS]f[ARGS]{"x": %s}'),
    "harmony": (
        HarmonyParser,
        '<|channel|>commentary to=functions.f<|message|>{"x": %s}<|call|>',
    ),
}


@pytest.mark.parametrize("name", FORMATS_OF_JSON)
@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_numbers_that_json_does_not_have_make_no_call(name, value):
    parser, form = FORMATS_OF_JSON[name]
    reply = parser().parse(form % value)
    assert reply.tool_calls == []
    assert value in reply.content


@pytest.mark.parametrize("name", FORMATS_OF_JSON)
def test_a_number_beyond_floats_leaves_arguments_json(name):
    parser, form = FORMATS_OF_JSON[name]
    [call] = parser().parse(form % "[1e999, -1e999, 1e-999]").tool_calls
    assert "Infinity" not in call.function.arguments
    largest, smallest, zero = json.loads(call.function.arguments)["x"]
    assert largest >= 1.7e308
    assert smallest == -largest
    assert zero == 0


@pytest.mark.parametrize("name", FORMATS_OF_JSON)
def test_arguments_with_an_unpaired_surrogate_can_be_encoded(name):
    parser, form = FORMATS_OF_JSON[name]
    [call] = parser().parse(form % '"\\ud83d \u00e9"').tool_calls
    assert json.loads(call.function.arguments.encode()) == {"x": "\ud83d \u00e9"}


def test_a_parameter_of_qwen3_coder_that_json_does_not_have_is_its_text():
    test_a_parameter_of_qwen3_coder_has_a_type_of_its_schema("NaN", {"type": "number"}, "NaN")
