"""Which parsers a chat template asks for, and what the options and `tool_choice` make of it."""

from __future__ import annotations

import pytest
from support.chat_models import FAMILIES, TIME, WEATHER, make_chat_model

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.replies import formats
from shmllm.frontend.replies.formats import ReplyFormats
from shmllm.frontend.replies.gigachat import GigaChat3Parser, GigaChat31Parser
from shmllm.frontend.replies.mistral import MistralArgsParser, MistralIdParser, MistralParser
from shmllm.frontend.replies.reasoning_config import name_and_marks
from shmllm.frontend.replies.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser,
    tool_parser,
)
from shmllm.frontend.text.tokenizer import Tokenizer

EXPECTED = {
    "qwen3": ("qwen3", "hermes"),
    "qwen3_coder": ("qwen3", "qwen3_coder"),
    "llama3": (None, "llama3_json"),
    "mistral": (None, "mistral"),
    "deepseek": ("qwen3", "deepseek_v3"),
    "gpt_oss": ("openai_gptoss", "openai"),
}
# What the templates of more models contain, and their parsers.
FRAGMENTS = {
    "'<tool_call>' + '<arg_key>' </think>": ("qwen3", "glm47"),
    "<tool_call>function-name\\n<arg_key>argument-key </think>": ("qwen3", "glm45"),
    "'\uff5cDSML\uff5c' 'function_calls>' </think>": ("qwen3", "deepseek_v32"),
    "'\uff5cDSML\uff5c' 'tool_calls>' </think>": ("qwen3", "deepseek_v4"),
    "<|START_THINKING|> <|START_ACTION|>": ("cohere_command3", "cohere_command3"),
    "Write 'Action:' ... \"tool_name\": title": (None, "command_r"),
    "'<|inner_prefix|>' '<|tools_prefix|>'": ("apertus", "apertus"),
    "<|begin|>assistant<|think|> <|tool_call:begin|><|tool_call:args|>": (
        "solar_open",
        "solar_open",
    ),
    "'</think{}>' '<tool_sep{}>' HYTK = ':opensource'": ("hy_v3", "hy_v3"),
    "</think> <answer> </answer> <tool_calls>": ("hunyuan_a13b", "hunyuan_a13b"),
    "<think></think> and <response></response> <|tool_call|>": ("ernie45", "granite"),
    "</think> <|tool_calls_section_begin|>": ("kimi_k2", "kimi_k2"),
    '<function name="f"><param name="p"> </think>': ("qwen3", "minicpm5"),
    "<TOOLCALL>[{": (None, "nemotron_json"),
    "formatted as functools[{": (None, "phi4_mini_json"),
    "<|im_start|> List of tools: [": (None, "lfm2"),
    "<|tool_call_start|>[": (None, "lfm2"),
    "<function_calls> </function_calls>": (None, "olmo3"),
    "<|channel>thought <|tool_call>call:": ("gemma4", "gemma4"),
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> </think>": ("qwen3", "glm45"),
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key> </think>": ("qwen3", "glm47"),
    "<|tool_calls_section_begin|>": (None, "kimi_k2"),
    "'<minimax:tool_call>' '<invoke name=\"' </think>": ("qwen3", "minimax_m2"),
    "'<seed:tool_call>' '</seed:think>'": ("seed_oss", "seed_oss"),
    "ns_token ~ '<tool_call>' '<invoke name=\"'": (None, None),
    "within <tool_call></tool_call>: <tool_calls>[{": (None, "jamba"),
    "[BEGIN FINAL RESPONSE] <tool_calls>[{": ("apriel", "jamba"),
    "'function call' '<|role_sep|>'": (None, "gigachat3"),
    "<|python_start|> <|python_end|>": (None, "llama4_pythonic"),
    "'<function=' + name '<|python_tag|>'": (None, None),
    "<|python_tag|>": (None, "llama3_json"),
    "'<\uff5ctool\u2581call\u2581begin\uff5c>' + name </think>": ("qwen3", "deepseek_v31"),
    "[THINK] [TOOL_CALLS]": ("mistral", "mistral"),
    "{{ messages }}": (None, None),
}


def parsers_of(names: tuple[str | None, str | None]) -> tuple[object, object]:
    reasoning, tools = names
    return (
        None if reasoning is None else REASONING_PARSERS[reasoning],
        None if tools is None else TOOL_PARSERS[tools],
    )


@pytest.mark.parametrize(
    ("template", "names"),
    [*((FAMILIES[name].template, EXPECTED[name]) for name in EXPECTED), *FRAGMENTS.items()],
    ids=[*EXPECTED, *map(str, range(len(FRAGMENTS)))],
)
def test_a_template_shows_its_parsers(template, names):
    found = reasoning_parser("auto", template), tool_parser("auto", template)
    assert found == parsers_of(names)


@pytest.mark.parametrize("name", ["auto", "mistral"])
def test_a_template_of_mistral_shows_how_a_forced_call_is_written(name):
    found = [
        tool_parser(name, f"[TOOL_CALLS]{marks}") for marks in ("", "[ARGS]", "[CALL_ID] [ARGS]")
    ]
    assert found == [MistralParser, MistralArgsParser, MistralIdParser]


def test_a_template_of_gigachat_shows_what_begins_a_call():
    texts = ("", "<|function_call|>")
    found = [tool_parser("gigachat3", text) for text in texts]
    assert found == [GigaChat3Parser, GigaChat31Parser]
    [tool] = [{"function": {"name": "f"}}]
    assert texts[1] in str(found[1].forced([tool], True))
    [call] = found[1]([tool]).parse('<|function_call|>{"name": "f"}').tool_calls
    assert call.function.name == "f"


@pytest.mark.parametrize(
    ("template", "option", "message"),
    [
        ("{{ messages }}", "auto", "does not read tools"),
        ("{{ messages }}", "hermes", "does not read tools"),
        ("{{ tools }}", "auto", "set the option tool_parser"),
        ("{{ tools }}", "hermes", None),
        ("{{ tools }}", "", None),
        ("{{ tools }}<tool_call>", "auto", None),
    ],
)
def test_tools_without_effect_are_one_warning(tokenizer, caplog, template, option, message):
    formats._warn_of_tools.cache_clear()
    for choice in (None, "auto"):
        ReplyFormats(tokenizer, tools=option).of("", template, [TIME], choice)
    ReplyFormats(tokenizer, tools=option).of("", template, None, None)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (message is not None)
    assert all(message in text for text in found)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_directory(make_chat_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


QWEN = FAMILIES["qwen3"].template


def test_options_come_before_the_template(tokenizer):
    formats = ReplyFormats(tokenizer, "", "llama3_json")
    found = formats.of("", QWEN, [TIME], None)
    assert (found.reasoning, found.tool_parser) == parsers_of((None, "llama3_json"))
    assert formats.of("", QWEN, None, None) is None
    assert ReplyFormats(tokenizer, "mistral", "").of("", QWEN, [TIME], None).tool_parser is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("qwen", "auto"), "reasoning_parser='qwen' is unknown; did you mean 'qwen3'?"),
        (("auto", "herms"), "tool_parser='herms' is unknown; did you mean 'hermes'?"),
    ],
)
def test_unknown_parsers_are_refused(tokenizer, options, message):
    with pytest.raises(EngineStartError) as caught:
        ReplyFormats(tokenizer, *options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("", False),
        ("<think>", True),
        ("x<think>a</think>b", False),
        ("<think>a</think>b<think>\n", True),
    ],
)
def test_a_prompt_may_begin_the_reasoning(tokenizer, prompt, is_open):
    assert ReplyFormats(tokenizer).of(prompt, QWEN, None, None).is_open is is_open


@pytest.mark.parametrize(("prompt", "is_open"), [("", True), ("<think></think>", False)])
def test_deepseek_r1_begins_inside_of_reasoning(tokenizer, prompt, is_open):
    found = ReplyFormats(tokenizer, "deepseek_r1").of(prompt, "", None, None)
    assert found.is_open is is_open


def test_a_named_tool_is_the_only_one_that_is_forced(tokenizer):
    named = {"type": "function", "function": {"name": "time"}}
    found = ReplyFormats(tokenizer).of("", QWEN, [WEATHER, TIME], named)
    assert found.tools == [TIME]
    assert "weather" not in str(found.constraint)
    both = ReplyFormats(tokenizer).of("", QWEN, [WEATHER, TIME], "required")
    assert both.tools == [WEATHER, TIME]


def test_a_call_cannot_be_forced_without_a_known_format(tokenizer):
    with pytest.raises(RequestError, match="set the option tool_parser"):
        ReplyFormats(tokenizer).of("", "{{ messages }}", [TIME], "required")


@pytest.mark.parametrize(
    "parameters",
    [
        5,
        {"properties": None},
        {"properties": {"city": None}},
        {"properties": {"city": {"type": 5}}},
        {"properties": {"city": {"type": "string"}}, "required": None},
    ],
)
def test_a_malformed_tool_cannot_be_forced_with_tags(tokenizer, parameters):
    tool = {"type": "function", "function": {"name": "time", "parameters": parameters}}
    with pytest.raises(RequestError, match="parameters of 'time' must be the JSON schema of an"):
        ReplyFormats(tokenizer, "auto", "glm47").of("", QWEN, [tool], "required")


def test_a_parameter_may_have_any_value(tokenizer):
    function = {"name": "time", "parameters": {"properties": {"zone": True}}}
    tool = {"type": "function", "function": function}
    found = ReplyFormats(tokenizer, "auto", "glm47").of("", QWEN, [tool], "required")
    assert "zone" in str(found.constraint)


def test_a_budget_has_the_tokens_of_the_marks(tokenizer):
    budget = ReplyFormats(tokenizer).thinking(7)
    added = tokenizer.added_tokens
    assert budget == (7, (added["<think>"],), *[(added["</think>"],)] * 2)
    assert ReplyFormats(tokenizer, "mistral").thinking(0).begin == tuple(
        tokenizer.encode("[THINK]", add_special_tokens=False)
    )
    with pytest.raises(RequestError, match="set the option reasoning_parser"):
        ReplyFormats(tokenizer, "").thinking(7)


def test_a_budget_has_the_marks_of_the_reasoning_config(tokenizer):
    added = tokenizer.added_tokens
    phrase = tokenizer.encode("I stop.", add_special_tokens=False)
    name, marks = name_and_marks("auto", {"reasoning_end_str": "I stop.</think>"})
    budget = ReplyFormats(tokenizer, name, marks=marks).thinking(7)
    close = added["</think>"]
    assert budget == (7, (added["<think>"],), (*phrase, close), (close,))
    name, marks = name_and_marks(
        "", {"reasoning_start_str": "<think>", "reasoning_end_str": "I stop."}
    )
    budget = ReplyFormats(tokenizer, name, marks=marks).thinking(7)
    assert budget == (7, (added["<think>"],), tuple(phrase), tuple(phrase))
    _, marks = name_and_marks("auto", {"reasoning_end_str": "I stop."})
    with pytest.raises(RequestError, match="of reasoning_config must have '</think>'"):
        ReplyFormats(tokenizer, marks=marks).thinking(7)
    _, marks = name_and_marks("", {"reasoning_start_str": "<think>"})
    with pytest.raises(RequestError, match="reasoning_parser, or reasoning_config"):
        ReplyFormats(tokenizer, "", marks=marks).thinking(7)


def test_the_reasoning_config_may_name_the_parser():
    assert name_and_marks("auto", {"reasoning_parser": "qwen3"})[0] == "qwen3"
    assert name_and_marks("qwen3", {"reasoning_parser": "qwen3"})[0] == "qwen3"
    assert name_and_marks("qwen3", None)[0] == name_and_marks("qwen3", {})[0] == "qwen3"
    for given, message in (
        ({"reasoning_parser": "mistral"}, "is 'qwen3', and 'mistral' in reasoning_config"),
        ({"start": "x"}, "reasoning_config has 'start'; known are reasoning_parser, reasoning_st"),
        ({"reasoning_end_str": 3}, "reasoning_end_str of reasoning_config must be a text, got 3"),
        (["x"], "reasoning_config must be a dict"),
    ):
        with pytest.raises(EngineStartError, match=message):
            name_and_marks("qwen3", given)
