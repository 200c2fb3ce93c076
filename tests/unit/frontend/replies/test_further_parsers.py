"""Parsers of further models: what they find in whole texts, and the same however a text is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replies import OSLO, TOOLS, parsed_in_pieces, parts

from shmllm.frontend.replies.formats import ReplyFormat
from shmllm.frontend.replies.registry import REASONING_PARSERS, TOOL_PARSERS

CALLS = [("weather", OSLO)]
TWO = [*CALLS, ("time", "{}")]
DSML = "\uff5cDSML\uff5c"


def dsml(name, calls):
    return f"<{DSML}{name}>\n{calls}\n</{DSML}{name}>"


INVOKED = (
    f'<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>'
)
LIST = f'[{{"name": "weather", "arguments": {OSLO}}}, {{"name": "time", "arguments": {{}}}}]'
ACTION = (
    "<|START_ACTION|>[\n"
    f'    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {OSLO}}},\n'
    '    {"tool_call_id": "1", "tool_name": "time", "parameters": {}}\n]<|END_ACTION|>'
)
SOLAR = (
    f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>{OSLO}"
    "<|tool_call:end|><|calls|>"
)
NEXT = "<|begin|>assistant"
HY = (
    "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n"
    "<arg_value:opensource>Oslo</arg_value:opensource>\n"
    "<arg_key:opensource>days</arg_key:opensource>\n"
    "<arg_value:opensource>2</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource>"
)
MINICPM = (
    '<function name="weather"><param name="city">Oslo</param>'
    '<param name="days">2</param></function>'
)
LFM2 = "<|tool_call_start|>[{}]<|tool_call_end|>"
GEMMA = "<|tool_call>call:weather{{{}}}<tool_call|>"
GEMMA_VALUES = '{"a": [1.5, null, {"b": true, "c d": null}], "e": {}, "f": [], "g": "{\\"x\\"]\\n"}'
R_PLUS = (
    'Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {\n'
    '            "city": "Oslo",\n            "days": 2\n        }\n    }\n]```'
)

# name: (names of the parsers of reasoning and of calls, text, (reasoning, content, calls))
CASES = {
    "deepseek 3.2": (
        ("", "deepseek_v32"),
        f"I look.\n\n{dsml('function_calls', INVOKED)}",
        ("", "I look.", CALLS),
    ),
    "deepseek 3.2, kinds": (
        ("", "deepseek_v32"),
        dsml("function_calls", INVOKED.replace('"true">Oslo', '"true">07').replace(">2<", ">[1]<")),
        ("", "", [("weather", '{"city": "07", "days": [1]}')]),
    ),
    "deepseek 3.2, no kinds": (
        ("", "deepseek_v32"),
        dsml("function_calls", INVOKED.replace(' string="true"', "").replace("Oslo", "07")),
        ("", "", [("weather", '{"city": "07", "days": 2}')]),
    ),
    "deepseek 4": (
        ("deepseek_v4", "deepseek_v4"),
        f"<think>Hm.</think>\n\n{dsml('tool_calls', INVOKED)}",
        ("Hm.", "", CALLS),
    ),
    "deepseek, none": (
        ("", "deepseek_v32"),
        dsml("function_calls", "x"),
        ("", dsml("function_calls", "x"), []),
    ),
    "cohere": (
        ("cohere_command3", "cohere_command3"),
        f"<|START_THINKING|>Hm.<|END_THINKING|>{ACTION}",
        ("Hm.", "", TWO),
    ),
    "cohere, answer": (
        ("cohere_command3", "cohere_command3"),
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes. <|END_RESPONSE|>",
        ("Hm.", "Yes.", []),
    ),
    "cohere, answer of command 4": (
        ("cohere_command4", ""),
        "<|START_TEXT|>\nYes.<|END_TEXT|> \n",
        ("", "Yes.", []),
    ),
    "cohere, plain answer": (("cohere_command3", ""), " Yes.\n", ("", " Yes.\n", [])),
    "cohere, no list": (
        ("", "cohere_command3"),
        "<|START_ACTION|>[]<|END_ACTION|>",
        ("", "<|START_ACTION|>[]<|END_ACTION|>", []),
    ),
    "command r": (("", "command_r"), f"I look.\n{R_PLUS}\n", ("", "I look.", CALLS)),
    "command r, another block": (
        ("", "command_r"),
        "So:\n```json\n[1]```\n",
        ("", "So:\n```json\n[1]```\n", []),
    ),
    "apertus": (
        ("apertus", "apertus"),
        f'<|inner_prefix|>Hm.<|inner_suffix|>I look.<|tools_prefix|>[{{"weather": {OSLO}}}, '
        '{"time": {}}]<|tools_suffix|>',
        ("Hm.", "I look.", TWO),
    ),
    "apertus, inside of reasoning": (
        ("apertus", "apertus"),
        f'<|inner_prefix|>Hm. <|tools_prefix|>[{{"weather": {OSLO}}}]<|tools_suffix|>',
        ("Hm.", "", CALLS),
    ),
    "apertus, no call": (
        ("", "apertus"),
        "<|tools_prefix|>[{}]<|tools_suffix|>",
        ("", "<|tools_prefix|>[{}]<|tools_suffix|>", []),
    ),
    "solar": (
        ("solar_open", "solar_open"),
        f"<|think|>Hm.<|end|>{NEXT}{SOLAR}",
        ("Hm.", "", CALLS),
    ),
    "solar, answer": (
        ("solar_open", "solar_open"),
        f"<|think|>Hm.<|end|>{NEXT}<|content|>Yes.<|end|>",
        ("Hm.", "Yes.", []),
    ),
    "solar, answer and calls": (
        ("solar_open", "solar_open"),
        f"<|content|>I look.<|end|>{NEXT}{SOLAR}",
        ("", "I look.", CALLS),
    ),
    "hunyuan": (
        ("hunyuan_a13b", "hunyuan_a13b"),
        f"<think>\nHm.\n</think>\n<answer>\nI look.\n<tool_calls>{LIST}</tool_calls>\n</answer>",
        ("Hm.", "I look.", TWO),
    ),
    "hunyuan, answer": (
        ("hunyuan_a13b", ""),
        "<think>\n\n</think>\n<answer>\nUse <answer> x </answer>!\n</answer>",
        ("", "Use <answer> x </answer>!", []),
    ),
    "hunyuan 3": (
        ("hy_v3", "hy_v3"),
        f"<think:opensource>Hm.</think:opensource>I look.{HY}",
        ("Hm.", "I look.", CALLS),
    ),
    "minicpm": (("", "minicpm5"), f"I look.\n{MINICPM}\n{MINICPM}", ("", "I look.", CALLS * 2)),
    "minicpm, blocks": (
        ("", "minicpm5"),
        '<function name="weather"><param name="city"><![CDATA[a</param> < b\n]]></param>'
        '<param name="units"> <![CDATA[["C"]]]> </param></function>',
        ("", "", [("weather", '{"city": "a</param> < b\\n", "units": ["C"]}')]),
    ),
    "minicpm, no parameters": (
        ("", "minicpm5"),
        '<function name="time"></function>',
        ("", "", [("time", "{}")]),
    ),
    "nemotron": (
        ("qwen3", "nemotron_json"),
        f"<think>\nHm.</think>\n\n<TOOLCALL>{LIST}</TOOLCALL>\n",
        ("Hm.", "", TWO),
    ),
    "granite": (("", "granite"), f"<|tool_call|>{LIST}", ("", "", TWO)),
    "granite, answer": (
        ("ernie45", "granite4"),
        "<think>Hm.</think> <response>Yes.</response>",
        ("Hm.", "Yes.", []),
    ),
    "phi": (("", "phi4_mini_json"), f" functools{LIST}", ("", "", TWO)),
    "phi, Python": (("", "phi4_mini_json"), "Use functools.", ("", "Use functools.", [])),
    "kimi, inside of reasoning": (
        ("kimi_k2", "kimi_k2"),
        "<think>Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_calls_section_end|>",
        ("Hm.", "", CALLS),
    ),
    "lfm2": (
        ("qwen3", "lfm2"),
        "<think>Hm.</think>I look." + LFM2.format('weather(city="Oslo", days=2), time()'),
        ("Hm.", "I look.", TWO),
    ),
    "lfm2, text behind": (
        ("", "lfm2"),
        f"{LFM2.format('time()')}Now I know.",
        ("", "Now I know.", [("time", "{}")]),
    ),
    "lfm2, JSON": (("", "lfm2"), LFM2.format(LIST[1:-1]), ("", "", TWO)),
    "lfm2, positions": (
        ("", "lfm2"),
        LFM2.format("weather('Oslo')"),
        ("", LFM2.format("weather('Oslo')"), []),
    ),
    "lfm2, cut off": (
        ("", "lfm2"),
        "I look.\n<|tool_call_start|>[time(a='x",
        ("", "I look.\n<|tool_call_start|>[time(a='x", []),
    ),
    "olmo": (
        ("", "olmo3"),
        '<function_calls>weather(city="Oslo", days=2)\ntime()\n</function_calls>',
        ("", "", TWO),
    ),
    "pythonic": (("", "pythonic"), ' [weather(city="Oslo", days=2), time()]\n', ("", "", TWO)),
    "pythonic, text": (("", "pythonic"), "[1] says so.", ("", "[1] says so.", [])),
    "pythonic, text first": (("", "pythonic"), "So: [time()]", ("", "So: [time()]", [])),
    "llama 4": (
        ("", "llama4_pythonic"),
        'I look.<|python_start|>[weather(city="Oslo", days=2)]<|python_end|>',
        ("", "I look.", CALLS),
    ),
    "llama 4, without a mark": (
        ("", "llama4_pythonic"),
        '[weather(city="Oslo", days=2)]<|python_end|><|python_start|>x',
        ("", "<|python_start|>x", CALLS),
    ),
    "apriel": (
        ("apriel", "jamba"),
        "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nI look.\n"
        f"<tool_calls>{LIST}</tool_calls>\n[END FINAL RESPONSE]",
        ("Hm.", "I look.", TWO),
    ),
    "gigachat": (
        ("", "gigachat3"),
        'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", "arguments": '
        f"{OSLO}}}<|message_sep|>",
        ("", "I look.", CALLS),
    ),
    "gemma": (
        ("gemma4", "gemma4"),
        "<|channel>thought\nHm.\n<channel|>" + GEMMA.format('city:<|"|>Oslo<|"|>,days:2'),
        ("Hm.", "", CALLS),
    ),
    "gemma, values": (
        ("", "gemma4"),
        GEMMA.format('a:[1.5,None,{b:true,<|"|>c d<|"|>:null}],e:{},f:[],g:<|"|>{"x"]\n<|"|>'),
        ("", "", [("weather", GEMMA_VALUES)]),
    ),
    "gemma, none": (("", "gemma4"), GEMMA.format("a:b"), ("", GEMMA.format("a:b"), [])),
}


def parser_of(names, tools=tuple(TOOLS)):
    reasoning, calls = names
    return ReplyFormat(
        REASONING_PARSERS[reasoning] if reasoning else None,
        TOOL_PARSERS[calls] if calls else None,
        tools,
    ).parser()


@pytest.mark.parametrize("name", CASES)
def test_a_text_has_these_parts_however_it_is_cut(name):
    names, text, expected = CASES[name]
    assert parts(parser_of(names).parse(text)) == expected
    for at in range(len(text) + 1):
        assert parsed_in_pieces(parser_of(names), [text[:at], text[at:]]) == expected, text[:at]
    assert parsed_in_pieces(parser_of(names), text) == expected


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_a_damaged_text_loses_nothing_and_is_the_same_in_pieces(name, data):
    names, text, _ = CASES[name]
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    damaged = text[:low] + data.draw(st.text("<>[]{}()|\"'\\,:=a0 \n", max_size=3)) + text[high:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(damaged)), max_size=4)))
    pieces = [damaged[a:b] for a, b in zip([0, *cuts], [*cuts, len(damaged)], strict=True)]
    reasoning, content, calls = parsed_in_pieces(parser_of(names), pieces)
    whole = parser_of(names)
    assert parts(whole.parse(damaged)) == (reasoning, content, calls)
    if not calls:
        assert bare(names, reasoning + content) == bare(names, damaged)


def bare(names, text):
    """A text without blanks, and without the marks that are no part of reasoning and content."""
    reasoning, calls = names
    parsers = [REASONING_PARSERS[reasoning]] if reasoning else []
    marks = [mark for each in parsers for mark in (each.begin, each.end)]
    for each in [*parsers, *([TOOL_PARSERS[calls]] if calls else [])]:
        marks += each.frame
    for mark in marks:
        text = text.replace(mark, "")
    return "".join(text.split())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'it\'s'", "it's"),
        ("'it's'", "it's"),
        ("'a \"b\"\nc'", 'a "b"\nc'),
        ('"a, b"', "a, b"),
        (r'"\u00e9\ud83d\ude00\x41\/\d\n"', "é😀A/\\d\n"),
        (r'"\ud83d"', "\ud83d"),
        ('"""a "b" c"""', 'a "b" c'),
        ("07", 7),
        ("-1.5e3", -1500.0),
        ("1e999", 1.7976931348623157e308),
        ("[True, false, None, null,]", [True, False, None, None]),
        ("{'a': {\"b\": []}, 'c': ''}", {"a": {"b": []}, "c": ""}),
    ],
)
def test_a_value_of_lfm2_is_what_python_or_json_mean(text, value):
    reply = parser_of(("", "lfm2")).parse(LFM2.format(f"f(from={text}, x=1)"))
    [call] = reply.tool_calls
    assert json.loads(call.function.arguments) == {"from": value, "x": 1}


@pytest.mark.parametrize("text", ["x", "f()", "1 + 2", "{1: 2}", "{a: 2}", "(1, 2)", "f'a'", "--1"])
def test_what_is_no_value_of_lfm2_makes_no_call(text):
    reply = parser_of(("", "lfm2")).parse(LFM2.format(f"f(x={text})"))
    assert (reply.tool_calls, reply.content) == ([], LFM2.format(f"f(x={text})"))


def test_solars_ids_are_those_that_the_model_wrote():
    [call] = parser_of(("", "solar_open")).parse(SOLAR).tool_calls
    assert call.id == "a1b2c3d4e5"
    [call] = parser_of(("", "solar_open")).parse(SOLAR.replace("a1b2c3d4e5", "")).tool_calls
    assert len(call.id) == 9
    text = SOLAR.replace("<|tool_call:name|>", "")
    [call] = parser_of(("", "solar_open")).parse(text).tool_calls
    assert (call.function.name, len(call.id)) == ("a1b2c3d4e5weather", 9)
