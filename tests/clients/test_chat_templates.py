"""Replies in the words of real chat templates: what a template writes into a prompt for an
assistant's message, the reply's parser reads as the same message.

The templates are other people's, so they are not in the repository. llama.cpp has a collection:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar -xzf llama_cpp_python-0.3.36.tar.gz
    export SHMLLM_CHAT_TEMPLATES=$PWD/llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from llguidance import LLMatcher

from shmllm.frontend.constraints.structured_outputs import _byte_tokenizer, grammar_of
from shmllm.frontend.replies.formats import ReplyFormat, ReplyFormats, ToolChoice
from shmllm.frontend.replies.marks import cut_at_mark
from shmllm.frontend.replies.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser,
    tool_parser,
)
from shmllm.frontend.text.chat_template import render_chat
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.outputs.reply import Reply
from shmllm.params.structured_outputs import StructuredOutputsParams

VARIABLE = "SHMLLM_CHAT_TEMPLATES"
DIRECTORY = Path(os.environ.get(VARIABLE, ""))
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        VARIABLE not in os.environ,
        reason=f"{VARIABLE} names no directory of templates; the docstring says where to get them",
    ),
]

NUM_CUTS = 20
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Any."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many."},
                "hourly": {"type": "boolean", "description": "Whether for each hour."},
                "unit": OPTIONAL_TEXT,
                "code": OPTIONAL_TEXT,
                "tags": {"type": "array", "items": {"type": "object"}, "description": "Any."},
            },
            "required": ["city", "days"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "time",
        "description": "The time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "description": "Of the world."}},
            "required": ["zone"],
        },
    },
}
CALLS = [
    (
        "get_weather",
        {
            "city": 'Tromsø, "the <Paris>\nof the north"',
            "days": 2,
            "hourly": True,
            "unit": None,
            "code": "042",
            "tags": [{"a": [1.5, None, False]}, {}],
        },
    ),
    ("time", {"zone": "CET"}),
]
REASONING = "They ask for\n\nthe weather: {}."
CONTENT = "I look it up."
ANSWER = "It rains.\n\n- In Tromsø: 2 °C."


class Case(NamedTuple):
    """
    Attributes:
        end: what ends an assistant's message with calls; several texts have `OR` between them.
        tools: the name of the parser of calls.
        reasoning: the name of the parser of reasoning; None without one.
        has_content: whether the template writes content beside calls.
        has_several: whether it writes several calls of a message.
        has_reasoning: whether it writes the reasoning of a message behind the last question.
        answer_end: what ends a message without calls, if it is something else; "": the text does.
        ends_reasoning: whether it writes the end of reasoning that it leaves out.
        answer_reasoning: whether it writes the reasoning of messages without calls, if that is
            something else.
        begin: what begins an assistant's message, where the prompt is no part of a longer one.
    """

    end: str
    tools: str
    reasoning: str | None = None
    has_content: bool = True
    has_several: bool = True
    has_reasoning: bool = False
    answer_end: str | None = None
    ends_reasoning: bool = False
    answer_reasoning: bool | None = None
    begin: str = ""


IM_END = "<|im_end|>"
OR = " or "
EOS = "<end of sequence>"
HY_EOS = "<\uff5chy_eos:opensource\uff5c>"
TOOL_OUTPUTS = "<\uff5ctool\u2581outputs\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
CASES = {
    "Qwen-Qwen2.5-7B-Instruct": Case(IM_END, "hermes"),
    "Qwen-Qwen3-0.6B": Case(IM_END, "hermes", "qwen3", has_reasoning=True),
    "Qwen-QwQ-32B": Case(IM_END, "hermes", "qwen3"),
    "Qwen3-Coder": Case(IM_END, "qwen3_coder"),
    "Qwen3.5-4B": Case(IM_END, "qwen3_coder", "qwen3", has_reasoning=True),
    "StepFun3.5-Flash": Case(IM_END, "qwen3_coder", "qwen3", has_reasoning=True),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Case(IM_END, "qwen3_coder", "qwen3", has_reasoning=True),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Case(IM_END, "hermes", has_content=False),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Case(IM_END, "hermes", has_content=False),
    "Bielik-11B-v3.0-Instruct": Case(IM_END, "hermes", "qwen3", has_reasoning=True),
    "MiMo-VL": Case(IM_END, "hermes"),
    "ibm-granite-granite-4.0": Case("<|end_of_text|>", "hermes"),
    "ibm-granite-granite-4.1": Case("<|end_of_text|>", "hermes"),
    "Reka-Edge": Case("\n\n<sep>", "hermes", "qwen3", has_reasoning=True),
    **{
        f"meta-llama-Llama-{name}": Case(
            "<|eot_id|>", "llama3_json", has_content=False, has_several=False
        )
        for name in ("3.1-8B-Instruct", "3.2-3B-Instruct", "3.3-70B-Instruct")
    },
    "mistralai-Mistral-Nemo-Instruct-2407": Case(EOS, "mistral", has_content=False),
    "Mistral-Small-3.2-24B-Instruct-2506": Case(EOS, "mistral", has_content=False),
    "unsloth-mistral-Devstral-Small-2507": Case(EOS, "mistral"),
    "mistralai-Ministral-3-14B-Reasoning-2512": Case(EOS, "mistral", "mistral"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Case(  # which does not end a single call
        f"{DEEPSEEK_END}{OR}{TOOL_OUTPUTS}", "deepseek_v3", "qwen3", has_content=False
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Case(
        DEEPSEEK_END, "deepseek_v3", "qwen3", has_content=False
    ),
    "deepseek-ai-DeepSeek-V3.1": Case(DEEPSEEK_END, "deepseek_v31", "qwen3"),
    "GLM-4.6": Case("<|observation|>", "glm45", "qwen3", has_reasoning=True, answer_end=""),
    "GLM-4.7-Flash": Case(
        "<|observation|>",
        "glm47",
        "qwen3",
        has_reasoning=True,
        answer_end="",
        ends_reasoning=True,
    ),
    "moonshotai-Kimi-K2": Case(IM_END, "kimi_k2"),
    "MiniMax-M2": Case("[e~[", "minimax_m2", "qwen3", has_reasoning=True),
    "ByteDance-Seed-OSS": Case("<seed:eos>", "seed_oss", "seed_oss", has_reasoning=True),
    "deepseek-ai-DeepSeek-V3.2": Case(
        DEEPSEEK_END, "deepseek_v32", "qwen3", has_reasoning=True, ends_reasoning=True
    ),
    **{
        f"deepseek-ai-DeepSeek-{name}": Case(
            DEEPSEEK_END, "deepseek_v4", "qwen3", has_reasoning=True
        )
        for name in ("V4", "V4-Flash-0731")
    },
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Case(
        "<|END_OF_TURN_TOKEN|>",
        "cohere_command3",
        "cohere_command3",
        has_content=False,
        has_reasoning=True,
        answer_reasoning=False,
    ),
    "Cohere2MoE": Case(
        "<|END_OF_TURN_TOKEN|>",
        "cohere_command3",
        "cohere_command3",
        has_content=False,
        has_reasoning=True,
    ),
    "CohereForAI-c4ai-command-r-plus-tool_use": Case(
        "<|START_OF_TURN_TOKEN|>",
        "command_r",
        answer_end="<|END_OF_TURN_TOKEN|>",
        begin="<|CHATBOT_TOKEN|>",
    ),
    "Apertus-8B-Instruct": Case("<|tools_suffix|>", "apertus", "apertus", answer_end=""),
    "upstage-Solar-Open-100B": Case(
        "<|calls|>",
        "solar_open",
        "solar_open",
        has_content=False,
        has_reasoning=True,
        answer_end="",
    ),
    "tencent-Hy3": Case(HY_EOS, "hy_v3", "hy_v3", has_reasoning=True, answer_end=""),
    "openbmb-MiniCPM5-1B": Case(IM_END, "minicpm5", "qwen3", has_reasoning=True),
    "Spark2.5": Case(DEEPSEEK_END, "glm47", "qwen3", has_reasoning=True),
    "unsloth-Apriel-1.5": Case("\n<|end|>", "jamba", "apriel", begin="<|assistant|>\n"),
    "Apriel-1.6-15b-Thinker-fixed": Case(
        "\n<|end|>",
        "jamba",
        "apriel",
        begin="<|begin_assistant|>\n",
    ),
    "GigaChat3-10B-A1.8B": Case(
        "<|message_sep|>\n\nfunction result<|role_sep|>",
        "gigachat3",
        has_several=False,
        answer_end="",
        begin="assistant<|role_sep|>\n",
    ),
    "GigaChat3.1-10B-A1.8B": Case("<|message_sep|>", "gigachat3", has_several=False),
    "LFM2.5-8B-A1B": Case(IM_END, "lfm2", "qwen3", has_reasoning=True),
    "google-gemma-4-31B-it": Case(
        "<|tool_response>",
        "gemma4",
        "gemma4",
        has_content=False,
        has_reasoning=True,
        answer_end="<turn|>",
        answer_reasoning=False,
    ),
    "google-gemma-4-31B-it-interleaved": Case(
        "<turn|>", "gemma4", "gemma4", has_reasoning=True, answer_reasoning=False
    ),
    "NVIDIA-Nemotron-Nano-v2": Case("\n<SPECIAL_12>", "nemotron_json", "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": Case("<|eot_id|>", "phi4_mini_json"),
    "poolside-Laguna-S-2.1": Case("</assistant>", "glm47", "qwen3", has_reasoning=True),
    "poolside-Laguna-XS-2.1": Case("\n</assistant>", "glm45", "qwen3", has_reasoning=True),
    "poolside-Laguna-XS.2": Case("\n</assistant>", "glm45", "qwen3", has_reasoning=True),
    "openai-gpt-oss-120b": Case(
        "<|call|>",
        "openai",
        "openai_gptoss",
        has_content=False,
        has_several=False,
        has_reasoning=True,
        answer_end="<|return|>",
    ),
}
ELSEWHERE = {
    "llama-cpp-deepseek-r1": "deepseek_v3",  # needs llama.cpp's own `tojson`
    "Kimi-K2-Instruct": "kimi_k2",  # changes a list, which sandboxes refuse
    "Kimi-K2-Thinking": "kimi_k2",  # likewise
    "LFM2-8B-A1B": "lfm2",  # likewise
    "LFM2.5-Instruct": "lfm2",  # likewise
    "ibm-granite-granite-3.3-2B-Instruct": "granite",  # writes no calls
    "inclusionai-ling-3.0-flash": "glm45",  # whose text between marks begins with a line end
}
"""The parsers of calls of templates that no case renders."""

FORCED = [
    name
    for name in CASES
    if name
    not in (
        "mistralai-Mistral-Nemo-Instruct-2407",  # adds ids, which its model need not write
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",  # does not end a single call
        "unsloth-Apriel-1.5",  # likewise
        "Apriel-1.6-15b-Thinker-fixed",  # likewise
        "Apertus-8B-Instruct",  # whose end of calls ends the message here
        "upstage-Solar-Open-100B",  # has shorter ids here than its model writes
        "MiniMax-M2",  # has three line ends before a call
        "openai-gpt-oss-120b",  # has the recipient before the channel, its model behind it
    )
]
Message = dict[str, Any]
ASK: Message = {"role": "user", "content": "How is the weather?"}


def name_of(parser: Any) -> str:
    """The name of a parser of calls; empty for None."""
    if parser is None:
        return ""
    exact = [name for name, known in TOOL_PARSERS.items() if parser is known]
    return next(iter(exact), "") or next(
        name for name, known in TOOL_PARSERS.items() if issubclass(parser, known)
    )


def template_of(name: str) -> str:
    path = DIRECTORY / f"{name}.jinja"
    assert path.is_file(), f"{VARIABLE} has no {path.name}; is it another version's?"
    return path.read_text(encoding="utf-8")


def said(calls: Sequence[tuple[str, Any]] = (), **parts: str | None) -> Message:
    """A message of the assistant."""
    message: Message = {"role": "assistant", **parts}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call0000{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def results_of(calls: Sequence[tuple[str, Any]]) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call0000{index}", "name": name, "content": "2 °C"}
        for index, (name, _) in enumerate(calls)
    ]


def render(
    template: str,
    messages: list[Message],
    *,
    is_prompt: bool,
    tools: Sequence[Any] | None = (WEATHER, TIME),
) -> str:
    return render_chat(
        template,
        messages,
        add_generation_prompt=is_prompt,
        continue_final_message=False,
        tools=tools,
        variables={
            "bos_token": "<begin of sequence>",
            "eos_token": EOS,
            "enable_thinking": True,
            "reasoning_effort": "high",
            "functions": "[]",
            "datetime": "today",
        },
    )


def reply_in(
    template: str, messages: list[Message], end: str, choice: ToolChoice = None, begin: str = ""
) -> tuple[str, ReplyFormat]:
    """What the template wrote for messages[1], and how a reply to messages[0] is read.

    A template that begins reasoning in a prompt may leave it out of earlier messages, and one that
    has the tools in front of the last question does not have them there. Then the text is the reply
    to a prompt without them.
    """
    whole = render(template, messages, is_prompt=False)
    if begin:
        prompt, _, reply = whole.partition(begin)
    else:
        prompts = prompts_of(template, messages[0])
        prompt = next(each for each in prompts if whole.startswith(each))
        reply = whole.removeprefix(prompt)
    if end:
        reply, mark, _ = cut_at_mark(reply, end.split(OR))
        assert mark
    tokenizer: Any = Tokenizer
    found = ReplyFormats(tokenizer).of(prompt, template, [WEATHER, TIME], choice)
    assert found is not None
    return reply, found


def prompts_of(template: str, question: Message) -> Iterator[str]:
    for tools in ((WEATHER, TIME), None):
        prompt = render(template, [question], is_prompt=True, tools=tools)
        yield prompt
        if "<think>" in prompt:
            yield prompt[: prompt.rfind("<think>")]


def in_pieces(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(len(text) + 1)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parse(text: str, how: ReplyFormat) -> Reply:
    """Parse a reply as a whole, and check that pieces of it add up to the same."""
    whole = how.parser().parse(text)
    for seed in range(NUM_CUTS):
        parser = how.parser()
        streamed = Reply()
        for piece in in_pieces(text, seed):
            streamed.add(parser.feed(piece))
        streamed.add(parser.finish())
        assert parts_of(streamed) == parts_of(whole), f"pieces of seed {seed}"
    return whole


def parts_of(reply: Reply) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [call.function for call in reply.tool_calls]
    return (
        reply.reasoning,
        reply.content.lstrip(" "),  # Reka's template has a blank before it
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


@pytest.mark.parametrize("name", CASES)
def test_the_template_shows_its_formats(name: str) -> None:
    case, template = CASES[name], template_of(name)
    assert name_of(tool_parser("auto", template)) == case.tools
    expected = None if case.reasoning is None else REASONING_PARSERS[case.reasoning]
    assert reasoning_parser("auto", template) is expected


VARIANTS = [
    pytest.param(name, content, num_calls, id=f"{name}-{content}-{num_calls}")
    for name, case in CASES.items()
    for content in ("", None, *[CONTENT] * case.has_content)
    for num_calls in (1, *[2] * case.has_several)
]


@pytest.mark.parametrize("is_last", [True, False], ids=["last", "earlier"])
@pytest.mark.parametrize(("name", "content", "num_calls"), VARIANTS)
def test_calls_are_read_as_the_template_writes_them(
    name: str, content: str | None, num_calls: int, is_last: bool
) -> None:
    case, template = CASES[name], template_of(name)
    calls = CALLS[:num_calls]
    conversation = [ASK, said(calls, reasoning=REASONING, content=content), *results_of(calls)]
    if not is_last:
        conversation += [said(content=ANSWER), {"role": "user", "content": "Thanks!"}]
    text, how = reply_in(template, conversation, case.end, begin=case.begin)
    reasoning, found_content, found = parts_of(parse(text, how))
    assert found == calls
    if case.ends_reasoning and not is_last:
        found_content = found_content.removeprefix("</think>")
    assert found_content == (content or "")
    if is_last:
        assert reasoning == (REASONING if case.has_reasoning else "")
    else:
        assert reasoning in ("", REASONING)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_is_one_that_the_template_writes(name: str, choice: ToolChoice) -> None:
    case, template = CASES[name], template_of(name)
    calls = CALLS[1:]
    conversation = [ASK, said(calls, reasoning=REASONING, content=""), *results_of(calls)]
    text, how = reply_in(template, conversation, case.end, choice, case.begin)
    grammar = grammar_of(StructuredOutputsParams(structural_tag=how.constraint))
    tokens = list(text.strip().encode())
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


# The template of Nemotron Nano 2 writes the last answer as reasoning, and that of Apriel leaves out
# the begin of reasoning.
NOT_ANSWERED = "NVIDIA-Nemotron-Nano-v2", "Apriel-1.6-15b-Thinker-fixed"


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_ANSWERED])
def test_an_answer_is_content(name: str) -> None:
    case, template = CASES[name], template_of(name)
    answer = said(content=ANSWER, reasoning=REASONING)
    end = case.end if case.answer_end is None else case.answer_end
    text, how = reply_in(template, [ASK, answer], end, begin=case.begin)
    reasoning, content, calls = parts_of(parse(text, how))
    assert (content, calls) == (ANSWER, [])
    is_written = case.has_reasoning if case.answer_reasoning is None else case.answer_reasoning
    assert reasoning == (REASONING if is_written else "")


def test_content_beside_calls_and_reasoning_is_analysis_for_gpt_oss() -> None:
    name = "openai-gpt-oss-120b"
    template = template_of(name)
    message = said(CALLS[:1], reasoning=REASONING, content=CONTENT)
    text, how = reply_in(template, [ASK, message, *results_of(CALLS[:1])], CASES[name].end)
    assert parts_of(parse(text, how)) == (f"{REASONING}\n{CONTENT}", "", CALLS[:1])


def test_formats_that_are_not_known_are_taken_for_none_that_is() -> None:
    names = sorted(path.stem for path in DIRECTORY.glob("*.jinja"))
    known = {name: case.tools for name, case in CASES.items()} | ELSEWHERE
    found = {name: name_of(tool_parser("auto", template_of(name))) for name in names}
    assert {name: found[name] for name in names if found[name]} == known
