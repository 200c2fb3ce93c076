"""Chat templates: the rendered text equals that of transformers, and errors have one line."""

from __future__ import annotations

import enum
import json
import warnings

import pytest

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.text.chat_template import (
    load_templates,
    read_given_template,
    select_template,
)
from shmllm.frontend.text.tokenizer import Tokenizer

HEADERS = """{{ bos_token }}
{%- if tools is not none %}
    {{- "tools: " }}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' }}
    {{- message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""
THINKING = """{%- set ns = namespace(last=-1, seen=dict(a=1)) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
        {%- for part in message.content %}{% set content = part.text %}[{{ part.text }}]{% endfor %}
    {%- endif %}
    {{- '<im>' + message.role + '\\n' + content }}
    {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
        {{- '\\n<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- '</im>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<im>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
ALTERNATING = """{{- bos_token -}}
{%- for message in messages -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate, got ' ~ message.role ~ '\\nas ' ~ loop.index) -}}
  {%- endif -%}
  {%- if message['role'] == 'user' -%}{{ ' [INST] ' + message['content'] + ' [/INST]' }}
  {%- else -%}{{ ' ' + message['content'] + eos_token }}{%- endif -%}
{%- endfor -%}"""
COMMENTS = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ message.content + '\\n' }}"
    "{%- elif message.role == 'system' -%}{{ '\"\"\"' + message.content + '\"\"\"\\n\\n' }}"
    "{%- else -%}{{ '# ' + message.content | replace('\\n', '\\n# ') + '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
)
TRAINING = """{% set x = 1 %}
{% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
{% generation %}{% set x = 2 %}{{ message.content }}{{ x }}{% endgeneration %}
    {% else %}
{{ message.content }}{{ x }}
    {% endif %}
{% endfor %}
{{ {'text': 'é <b>', 'n': none} | tojson }}{{ missing_token }}{{ extra }}"""
TEMPLATES = {
    "headers": HEADERS,
    "thinking": THINKING,
    "alternating": ALTERNATING,
    "comments": COMMENTS,
    "training": TRAINING,
}
USER = {"role": "user", "content": "Count:\none <two> 中 "}
REPLY = {"role": "assistant", "content": " Sure: 1,"}
CHATS = {
    "one": [USER],
    "three": [USER, REPLY, {"role": "user", "content": "go on"}],
    "reply": [USER, REPLY],
    "reasoning": [USER, {**REPLY, "reasoning": "hm", "tool_calls": None}],
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Sucht <b>ü</b>"}}]


NO_PARTS = {
    "drops what is no string": """{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}
    {%- else %}{% set content = '' %}{% endif %}
    {{- '<im>' + message.role + '\\n' + content + '</im>\\n' }}
{%- endfor %}""",
    "writes what is iterable as JSON": """{%- for message in messages %}
    {%- if message.role == 'tool' and message.content is iterable %}{{ message.content | tojson }}
    {%- else %}{{- '<h>' + message.role + '</h>' + message.content | trim }}{% endif %}
{%- endfor %}""",
    "goes through lines": """{%- for message in messages %}
    {%- for line in message.content.split('\\n') %}{{- '> ' + line + '\\n' }}{% endfor %}
{%- endfor %}""",
}
"""Templates that name contents in tests or loops, but read texts only, as many models have them."""

ONLY_PARTS = """{%- for message in messages %}
    {{- message.role | capitalize }}{{ ':' if message.content[0].type == 'image' else ': ' }}
    {%- for line in message['content'] %}{% if line.type == 'text' %}{{ line.text }}{% endif %}
    {%- endfor %}<end>
{% endfor %}"""
PARTS_OF_USERS = """{%- for message in messages %}
    {%- if message.role == 'user' and message.content is not string %}
        {%- for part in message.content %}{{ part.text }}{% endfor %}
    {%- else %}{{ message.content | trim }}{% endif %}
{% endfor %}"""


@pytest.fixture(scope="module")
def ours(byte_level_model):
    return Tokenizer.from_directory(byte_level_model)


@pytest.fixture(scope="module")
def theirs(byte_level_model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(byte_level_model)


def both(ours, theirs, messages, **options):
    options.setdefault("add_generation_prompt", True)
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.apply_chat_template(messages, **options) == expected
    return expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generation", [True, False])
def test_the_text_equals_that_of_transformers(ours, theirs, template, chat, generation):
    text = both(
        ours,
        theirs,
        CHATS[chat],
        chat_template=TEMPLATES[template],
        add_generation_prompt=generation,
        extra="more",
    )
    assert "one <two>" in text


@pytest.mark.parametrize("template", ["headers", "thinking", "alternating", "comments"])
@pytest.mark.parametrize("content", ["to be", "to be ", " or", "be"])
def test_continue_final_message(ours, theirs, template, content):
    messages = [{"role": "user", "content": "to be?"}, {"role": "assistant", "content": content}]
    text = both(
        ours,
        theirs,
        messages,
        chat_template=TEMPLATES[template],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith(content.strip() if template == "headers" else content)


def test_continue_final_message_in_parts(ours, theirs):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    both(
        ours,
        theirs,
        [USER, {"role": "assistant", "content": parts}],
        chat_template=THINKING,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert parts[1]["text"] == "b "


def test_tools_and_variables(ours, theirs):
    both(ours, theirs, [USER], chat_template=HEADERS, tools=TOOLS)
    both(ours, theirs, [USER], chat_template=THINKING, enable_thinking=False)
    both(ours, theirs, [USER], chat_template=HEADERS, bos_token="<other>")


@pytest.mark.parametrize(
    "part",
    [
        "a",
        {"text": "a"},
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "a"},
        {"type": "refusal", "refusal": "a"},
        {"type": "thinking", "thinking": "a"},
    ],
)
@pytest.mark.parametrize("content_format", ["openai", "string"])
def test_other_forms_of_text_parts_are_texts(ours, part, content_format):
    options = {
        "chat_template": "{{ messages[0].content }}",
        "chat_template_content_format": content_format,
    }
    as_text = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert ours.apply_chat_template(
        [{"role": "user", "content": [part, "b"]}], **options
    ) == ours.apply_chat_template(as_text, **options)


def test_content_parts(ours, theirs):
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    both(ours, theirs, [message], chat_template=THINKING)
    text = ours.apply_chat_template([message], chat_template=COMMENTS)
    assert text == "# a\n# b\n"


@pytest.mark.parametrize("template", NO_PARTS)
def test_parts_are_one_text_for_a_template_that_does_not_go_through_them(ours, theirs, template):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    source = NO_PARTS[template]
    expected = both(ours, theirs, [{"role": "user", "content": "a\nb"}], chat_template=source)
    message = {"role": "user", "content": parts}
    assert ours.apply_chat_template([message], chat_template=source) == expected


def test_texts_are_parts_for_a_template_that_reads_nothing_else(ours, theirs):
    parts = [USER | {"content": [{"type": "text", "text": USER["content"]}]}]
    expected = both(ours, theirs, parts, chat_template=ONLY_PARTS)
    assert "one <two>" in expected
    assert ours.apply_chat_template([USER], chat_template=ONLY_PARTS) == expected
    reply = [USER, REPLY]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours.apply_chat_template(reply, chat_template=ONLY_PARTS, **options)
    assert text.endswith(f"Assistant: {REPLY['content']}")


def test_a_list_of_one_text_is_that_text_for_a_template_that_reads_either(ours, theirs):
    system = {"role": "system", "content": "Brief."}
    expected = both(ours, theirs, [system, USER], chat_template=PARTS_OF_USERS)
    listed = [
        {**each, "content": [{"type": "text", "text": each["content"]}]} for each in (system, USER)
    ]
    assert ours.apply_chat_template(listed, chat_template=PARTS_OF_USERS) == expected


def test_the_template_of_the_bundled_model(ours):
    messages = [{"role": "system", "content": "Doc."}, {"role": "user", "content": "a\nb"}, REPLY]
    text = ours.apply_chat_template(messages, chat_template=COMMENTS)
    assert text == '"""Doc."""\n\n# a\n# b\n Sure: 1,\n'


def test_values_are_converted_to_json_types(ours):
    class Role(enum.StrEnum):
        USER = "user"

    messages = ({"role": Role.USER, "content": "x", "n": [enum.IntEnum("N", "ONE").ONE]},)
    template = "{{ messages[0].role }}{{ messages[0].n }}"
    assert ours.apply_chat_template(messages, chat_template=template) == "user[1]"


SHOWS_ALL = "{{ messages | tojson }}"


def shown(tokenizer, *messages):
    """The messages as a template sees them."""
    return json.loads(tokenizer.apply_chat_template(messages, chat_template=SHOWS_ALL))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"city": "Bern", "days": [1, 2]}', {"city": "Bern", "days": [1, 2]}),
        ({"city": "Bern"}, {"city": "Bern"}),
        (r'{"\ud83d": ["\udfff"]}', {"?": ["?"]}),  # a prompt can contain no unpaired surrogate
        ("", {}),
        (None, {}),
        ("{", {}),
        ("[" * 100_000, {}),
        ("[1]", {}),
        ("3", {}),
        ([1], {}),
    ],
)
def test_arguments_of_tool_calls_are_dicts(ours, given, expected):
    function = {"name": "weather", "arguments": given}
    calls = [{"id": "a", "type": "function", "function": function}]
    (message,) = shown(ours, {"role": "assistant", "content": "", "tool_calls": calls})
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": expected}
    assert function["arguments"] == given


def test_tool_calls_without_arguments_or_calls(ours):
    call = {"type": "function", "function": {"name": "stop"}}
    with_call, without = shown(
        ours,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "x", "tool_calls": []},
    )
    assert with_call["tool_calls"][0]["function"] == {"name": "stop", "arguments": {}}
    assert without == {"role": "assistant", "content": "x"}


def test_arguments_that_are_no_json_object_are_reported(ours, caplog):
    calls = [{"function": {"name": "f", "arguments": "{"}}]
    shown(ours, {"role": "assistant", "tool_calls": calls})
    assert "messages[0].tool_calls has arguments that are no JSON object" in caplog.text


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_only_messages_of_the_assistant_have_reasoning(ours, name):
    user, assistant = shown(ours, {**USER, name: "hm"}, {**REPLY, name: "hm"})
    assert user == USER
    assert assistant == REPLY | dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "hm")


def test_strftime_now(ours, theirs):
    both(
        ours,
        theirs,
        [USER],
        chat_template="{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}",
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of dicts with role and content, got str"),
        ({"role": "user"}, "messages must be a list .* got dict"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be a dict with role and content, got str"),
        ([[USER]], r"messages\[0\] must be a dict .* got list"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"content must be a str .* got int"),
        (
            [{"role": "user", "content": [5]}],
            r"content\[0\] must be .* got a value of the type int",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"got a part of the type 'image_url'",
        ),
        ([{"role": "user", "content": ["a", {"type": "text"}]}], r"content\[1\] must be"),
        ([{"role": "user", "content": [{"type": 5, "text": "a"}]}], r"of the type '5'"),
        ([{"role": "user", "content": [{"file": "x"}]}], r"got a part with the fields file; other"),
        ([{"role": "user", "content": [{}]}], r"content\[0\] must be .* got an empty part"),
        ([{"role": "user", "content": "x", "f": object()}], "holds a object; .* JSON"),
        ([{**REPLY, "tool_calls": ["x"]}], r"tool_calls\[0\] must be .*\"function\""),
        ([{**REPLY, "tool_calls": [{"function": 3}]}], r"tool_calls\[0\] must be"),
        ([REPLY], "roles must alternate, got assistant as 1"),
    ],
)
def test_malformed_messages(ours, messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        ours.apply_chat_template(messages, chat_template=ALTERNATING)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", r"chat template failed \(TemplateSyntaxError\)"),
        ("{{ missing.field }}", r"\(UndefinedError\)"),
        ("{{ 'x' + 1 }}", r"\(TypeError\)"),
        ("{{ messages.append(1) }}", r"\(SecurityError\)"),
        ("{{ ''.__class__.__mro__[1] }}", r"\(SecurityError\)"),
        ("{{ dict.__class__.mro() }}", r"\(SecurityError\)"),
        ("{% set ns = namespace(__x=1) %}", r"\(SecurityError\)"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", r"\(SecurityError\)"),
    ],
)
def test_templates_that_fail(ours, template, message):
    with pytest.raises(RequestError, match=message) as caught:
        ours.apply_chat_template([USER], chat_template=template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [5, [], {"a": "b"}])
def test_a_template_that_is_no_text(ours, template):
    with pytest.raises(RequestError, match="chat_template must be a str, got"):
        ours.apply_chat_template([USER], chat_template=template)


@pytest.mark.parametrize("tools", ["x", ["x"], [print]])
def test_malformed_tools(ours, tools):
    with pytest.raises(RequestError, match="tools must be a list of dicts"):
        ours.apply_chat_template([USER], tools=tools)


@pytest.mark.parametrize(
    ("messages", "template", "options", "message"),
    [
        ([USER], COMMENTS, {"add_generation_prompt": True}, "needs add_generation_prompt=False"),
        ([USER], "{{ messages[0].role }}", {}, "does not write the last message"),
        ([{**USER, "content": []}], THINKING, {}, "holds no text"),
    ],
)
def test_continue_final_message_errors(ours, messages, template, options, message):
    options = {"add_generation_prompt": False} | options
    with pytest.raises(RequestError, match=message):
        ours.apply_chat_template(
            messages, chat_template=template, continue_final_message=True, **options
        )


def test_templates_are_read_from_their_files(tmp_path):
    assert load_templates(tmp_path) == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert load_templates(tmp_path) == {"default": "one"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_templates(tmp_path) == {"default": "d", "tool_use": "t"}
    (tmp_path / "processor_config.json").write_text("{}")
    assert load_templates(tmp_path) == {"default": "d", "tool_use": "t"}
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "p"}))
    assert load_templates(tmp_path) == {"default": "p"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of images"}))
    assert load_templates(tmp_path) == {"default": "of images"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert load_templates(tmp_path) == {"default": "file", "rag": "r"}


@pytest.mark.parametrize("entry", [3, [3], [{"name": "x"}], [{"name": "x", "template": 5}]])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_malformed_entry(tmp_path, entry, name):
    (tmp_path / name).write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(RequestError, match=f"{name}: chat_template must be a string or a list"):
        load_templates(tmp_path)


@pytest.mark.parametrize(
    ("templates", "wanted", "has_tools", "expected"),
    [
        ({"default": "d"}, None, False, "d"),
        ({"default": "d"}, None, True, "d"),
        ({"default": "d", "tool_use": "t"}, None, True, "t"),
        ({"default": "d", "tool_use": "t"}, None, False, "d"),
        ({"default": "d", "rag": "r"}, "rag", False, "r"),
        ({"default": "d"}, "{{ x }}", False, "{{ x }}"),
        ({}, "{{ x }}", False, "{{ x }}"),
    ],
)
def test_select_template(templates, wanted, has_tools, expected):
    assert select_template(templates, wanted, has_tools=has_tools) == expected


@pytest.mark.parametrize(
    ("templates", "message"),
    [({}, "has no chat template; pass one"), ({"a": "x", "b": "y"}, "with one of a, b")],
)
def test_no_template(templates, message):
    with pytest.raises(RequestError, match=message):
        select_template(templates, None, has_tools=False)


def test_tokenizer_without_template(tokenizer_of):
    with pytest.raises(RequestError, match="has no chat template"):
        tokenizer_of("metaspace").apply_chat_template([USER])


def test_a_given_template_is_a_file_a_source_or_a_name(tmp_path, monkeypatch):
    named = tmp_path / "additional_chat_templates"
    named.mkdir()
    (named / "short.jinja").write_text("short", encoding="utf-8")
    file = tmp_path / "other.jinja"
    file.write_text("é{{ messages }}", encoding="utf-8")
    for given in (file, str(file)):
        assert read_given_template(given, tmp_path) == "é{{ messages }}"
    for source in ("{{ messages }}", "two\nlines", "{{ messages }}" + 5000 * " ", "{{ '\0' }}"):
        assert read_given_template(source, tmp_path) == source
    assert read_given_template("short", tmp_path) == "short"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("of the file", encoding="utf-8")
    assert read_given_template("short", tmp_path) == "of the file"


def test_a_given_template_that_is_none_is_one_line(tmp_path):
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    (tmp_path / "chat_template.jinja").write_text("a", encoding="utf-8")
    for given, problem in [
        ("missing.jinja", "'missing.jinja': there is no such file.*the model has default$"),
        (tmp_path / "missing.jinja", "No such file"),
        ("", "no such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "latin.jinja", "utf-8"),
        ("{% if %}" + 500 * "x", r"x\.\.\.': no Jinja template: "),
        (5, "must be a path or the source of a template, got int"),
    ]:
        with pytest.raises(EngineStartError, match=problem) as caught:
            read_given_template(given, tmp_path)
        assert str(caught.value).startswith("chat_template")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
