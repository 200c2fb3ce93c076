"""What single templates need of messages with tool calls."""

from __future__ import annotations

import json

import pytest

from shmllm.frontend.text.chat_template import render_chat

USER = {"role": "user", "content": "How is the weather?"}
ARGUMENTS = {"city": "Tromsø", "days": 2}
WITHOUT_CONTENT = [{}, {"content": None}, {"content": ""}]
IDS = ["missing", "None", "empty"]
DEEPSEEK = """{% for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- tool['function']['name'] + ':' + tool['function']['arguments'] + ';' }}{% endfor %}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + '.' }}{% endif %}{% endfor %}"""
FUNCTIONARY = """{% for tool in messages[1].tool_calls %}
{{- '>>>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] }}{% endfor %}"""
LENGTH = """{% for message in messages %}
{%- if message['content'] is none or message['content'] == '' %}-{% endif %}
{{- message['content'] | length }} {% endfor %}"""
JSON = """{% for call in messages[1].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}
{%- if false %}{{ '{' + tool_call.arguments + '}' }}{% endif %}"""
GPT_OSS = """{% set message = messages[1] %}<|channel|>analysis{{ message.thinking }}
{%- if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}
{{- message.content }}"""


def render(template, **parts):
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}
    message = {"role": "assistant", "tool_calls": [call, call], **parts}
    return render_chat(
        template,
        [USER, message],
        add_generation_prompt=False,
        continue_final_message=False,
        tools=None,
        variables={},
    )


@pytest.mark.parametrize("parts", WITHOUT_CONTENT, ids=IDS)
def test_deepseek_gets_none_and_arguments_as_text(parts):
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    assert render(DEEPSEEK, **parts) == f"f:{arguments};" * 2


def test_arguments_at_the_end_of_a_joined_text_are_text():
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    assert render(FUNCTIONARY) == f">>>f\n{arguments}" * 2


def test_content_beside_calls_stays():
    assert render(DEEPSEEK, content="I look") == "I look."


@pytest.mark.parametrize("parts", WITHOUT_CONTENT, ids=IDS)
def test_others_get_an_empty_text(parts):
    assert render(LENGTH, **parts) == f"{len(USER['content'])} -0 "


def test_a_template_that_writes_json_gets_parsed_arguments():
    assert render(JSON) == json.dumps(ARGUMENTS, ensure_ascii=False) * 2


def test_gpt_oss_gets_content_beside_reasoning_as_reasoning():
    assert render(GPT_OSS, reasoning="Hm.", content="I look.") == (
        "<|channel|>analysisHm.\nI look."
    )
    assert render(GPT_OSS, reasoning="Hm.", content="") == "<|channel|>analysisHm."
    assert render(GPT_OSS, content="I look.") == "<|channel|>analysisI look."


@pytest.mark.parametrize("message", ["message", "messages[0]", "messages[-1]"])
def test_templates_read_the_parts_of_any_message(message):
    template = (
        "{% set message = messages[0] %}"
        f"{{% for part in {message}['content'] %}}{{{{ part['text'] }}}};{{% endfor %}}"
    )
    parts = [{"type": "text", "text": text} for text in "ab"]
    prompt = render_chat(
        template,
        [{"role": "user", "content": parts}],
        add_generation_prompt=False,
        continue_final_message=False,
        tools=None,
        variables={},
    )
    assert prompt == "a;b;"
