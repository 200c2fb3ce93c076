"""OpenAI's batch files: bodies become requests, and results become responses.

The example lines are those of OpenAI's guide to its Batch API.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from support.batch_helpers import answer

from shmllm.batch.openai import OpenAIFormat
from shmllm.outputs.reply import FunctionCall, ToolCall
from shmllm.outputs.request import CompletionOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GUIDE_INPUT = (
    '{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": '
    '{"model": "gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are a '
    'helpful assistant."},{"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}'
)
GUIDE_OUTPUT = (
    '{"id": "batch_req_123", "custom_id": "request-2", "response": {"status_code": 200, '
    '"request_id": "req_123", "body": {"id": "chatcmpl-123", "object": "chat.completion", '
    '"created": 1711652795, "model": "gpt-3.5-turbo-0125", "choices": [{"index": 0, "message": '
    '{"role": "assistant", "content": "Hello."}, "logprobs": null, "finish_reason": "stop"}], '
    '"usage": {"prompt_tokens": 22, "completion_tokens": 2, "total_tokens": 24}}}, '
    '"error": null}'
)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**body):
    fields = {"custom_id": "c", "method": "POST", "url": CHAT}
    return OpenAIFormat().row(3, fields | {"body": {"messages": MESSAGES} | body})


def completion(**body):
    fields = {"custom_id": "c", "method": "POST", "url": COMPLETIONS}
    return OpenAIFormat().row(3, fields | {"body": {"prompt": "abc"} | body})


def test_the_input_line_of_the_guide_is_read():
    row = OpenAIFormat().row(1, json.loads(GUIDE_INPUT))
    assert row.error is None
    assert [message["role"] for message in row.prompt] == ["system", "user"]
    assert row.sampling == {"max_tokens": 1000}


def keys(value):
    """The field names in a JSON value, without their values."""
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return [keys(item) for item in value] if isinstance(value, list) else None


def test_a_record_has_the_names_of_the_guide_s_output():
    record = OpenAIFormat().record(chat(model="m"), answer("Hello."))
    record["response"]["body"]["usage"].pop("prompt_tokens_details")
    assert keys(record) == keys(json.loads(GUIDE_OUTPUT))
    assert record["custom_id"] == "c"
    body = record["response"]["body"]
    assert body["model"] == "m"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ".olleH"}
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}


def test_a_reply_in_parts_is_a_message_with_its_parts():
    output = answer("x")
    [one] = output.outputs
    one.reasoning, one.content, one.tool_calls = "Hm.", "Yes.", []
    [choice] = OpenAIFormat().record(chat(), output)["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    assert choice["finish_reason"] == "stop"
    one.reasoning = one.content = ""
    one.tool_calls = [ToolCall("abcdefghi", FunctionCall("f", "{}"))]
    [choice] = OpenAIFormat().record(chat(), output)["response"]["body"]["choices"]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, ["f", "g"]),
        ({"parallel_tool_calls": None}, ["f", "g"]),
        ({"parallel_tool_calls": True}, ["f", "g"]),
        ({"parallel_tool_calls": False}, ["f"]),
    ],
)
def test_the_first_call_alone_is_kept_without_parallel_calls(body, names):
    output = answer("x")
    [one] = output.outputs
    one.content, one.tool_calls = "", [ToolCall(k, FunctionCall(k, "{}")) for k in "fg"]
    [choice] = OpenAIFormat().record(chat(**body), output)["response"]["body"]["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == names
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("value", [None, "medium"])
def test_the_default_verbosity_is_accepted(value):
    assert chat(verbosity=value).error is None


def test_a_completion_s_record():
    record = OpenAIFormat().record(completion(), answer("abc", num_cached_tokens=2))
    body = record["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "cba"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_echo_writes_the_prompt_first():
    record = OpenAIFormat().record(completion(echo=True), answer("abc"))
    assert record["response"]["body"]["choices"][0]["text"] == "abccba"


def test_the_effort_of_reasoning_is_a_variable_of_the_template():
    assert chat(reasoning_effort="high").template == {"reasoning_effort": "high"}
    both = chat(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert both.template == {"reasoning_effort": "low"}


def test_a_record_holds_every_choice():
    output = answer("abc")
    output.outputs.append(CompletionOutput(1, "zz", [1, 2], finish_reason="length"))
    body = OpenAIFormat().record(chat(n=2), output)["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({}, {}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        (
            {"temperature": 0.5, "top_p": None, "stop": "x", "seed": 1, "user": "u"},
            {"temperature": 0.5, "stop": "x", "seed": 1},
        ),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"stream": False, "response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}},
                }
            },
            {"structured_outputs": {"json": {}}},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {}}}},
        ),
        ({"thinking_token_budget": 9}, {"thinking_token_budget": 9}),
    ],
    ids=str,
)
def test_a_chat_body_becomes_parameters(body, sampling):
    row = chat(**body)
    assert row.error is None
    assert row.sampling == sampling
    assert row.defaults == {"temperature": 1.0, "max_tokens": None}
    assert row.prompt == MESSAGES


@pytest.mark.parametrize(
    ("body", "prompt", "sampling"),
    [
        ({}, {"prompt": "abc"}, {}),
        ({"prompt": ["abc"]}, {"prompt": "abc"}, {}),
        ({"prompt": [1, 2]}, {"prompt_token_ids": [1, 2]}, {}),
        ({"prompt": [[1, 2]]}, {"prompt_token_ids": [1, 2]}, {}),
        ({"logprobs": 2}, {"prompt": "abc"}, {"logprobs": 2}),
        ({"max_tokens": 4, "best_of": 1}, {"prompt": "abc"}, {"max_tokens": 4}),
        ({"cache_salt": "s"}, {"prompt": "abc", "cache_salt": "s"}, {}),
    ],
    ids=str,
)
def test_a_completion_body_becomes_parameters(body, prompt, sampling):
    row = completion(**body)
    assert row.error is None
    assert (row.prompt, row.sampling) == (prompt, sampling)
    assert row.defaults == {"temperature": 1.0, "max_tokens": 16}


@pytest.mark.parametrize(
    ("body", "template"),
    [
        ({"tools": [{"type": "function"}]}, {"tools": [{"type": "function"}]}),
        ({"tools": [{}], "tool_choice": "none"}, {}),
        (
            {"tools": [{}], "tool_choice": "required"},
            {"tools": [{}], "tool_choice": "required"},
        ),
        ({"chat_template_kwargs": {"thinking": False}}, {"thinking": False}),
        (
            {"tools": [{}], "chat_template_kwargs": {"tools": None, "self": 1}},
            {"tools": None, "self": 1},
        ),
        (
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
    ids=str,
)
def test_options_of_the_template(body, template):
    row = chat(**body)
    assert row.error is None
    assert row.template == template


BAD_BODIES = [
    (chat(temprature=1), "'body' has an unknown field 'temprature'; the nearest is 'temperature'"),
    (chat(stream=True), "'stream' can only be False in a batch, got True"),
    (chat(verbosity="low"), "'verbosity' can only be 'medium' in a batch, got 'low'"),
    (chat(parallel_tool_calls=0), "'parallel_tool_calls' must be true or false, got 0"),
    (completion(parallel_tool_calls=False), "unknown field 'parallel_tool_calls'"),
    (chat(top_logprobs=3), "'top_logprobs' needs 'logprobs' to be true"),
    (chat(messages="hi"), "'messages' must be a list"),
    (chat(response_format={"type": "xml"}), "'response_format' must be"),
    (chat(chat_template_kwargs=[]), "chat_template_kwargs must be a dict, got list"),
    (chat(chat_template_kwargs={"messages": []}), "cannot have 'messages'"),
    (
        chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "are both given",
    ),
    (completion(messages=MESSAGES), "'body' has an unknown field 'messages'"),
    (completion(prompt=["a", "b"]), "'prompt' holds 2 prompts; write each on its own line"),
    (completion(prompt=None), "'prompt' must be a string or a list of token ids"),
    (completion(prompt=5), "'prompt' must be a string or a list of token ids"),
    (completion(prompt=[]), "'prompt' must be a string or a list of token ids"),
    (completion(suffix="x"), "'suffix' can only be ''"),
    (completion(best_of=3), "'best_of' can only be 1"),
    (completion(echo=True, logprobs=1), "'echo' cannot be used with 'logprobs'"),
    (completion(echo=True, prompt=[1, 2]), "'echo' needs a prompt that is a string"),
    (completion(echo=True, prompt=[[1, 2]]), "'echo' needs a prompt that is a string"),
    (completion(echo="no"), "'echo' must be true or false, got \"no\""),
    (chat(logprobs=2), "'logprobs' must be true or false, got 2"),
]


@pytest.mark.parametrize(("row", "words"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_an_invalid_body_is_a_400_with_its_custom_id(row, words):
    assert words in (row.error or "")
    record = OpenAIFormat().failure(row, row.error)
    assert record["custom_id"] == "c"
    assert record["response"]["status_code"] == 400
    assert record["response"]["body"]["error"]["message"] == row.error
    assert record["error"]["message"] == row.error


GOOD = {"custom_id": "c", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (GOOD | {"custom_id": 5}, "'custom_id' must be a string"),
        (GOOD | {"method": "GET"}, "'method' must be 'POST', got 'GET'"),
        (GOOD | {"url": "/v1/embeddings"}, "'url' must be .* got '/v1/embeddings'"),
        (GOOD | {"body": "x"}, "'body' must be an object"),
        ({"prompt": "a"}, "'custom_id' must be a string"),
    ],
)
def test_an_invalid_row_is_a_400(fields, words):
    import re

    row = OpenAIFormat().row(3, fields)
    assert re.search(words, row.error or "")
    assert OpenAIFormat().failure(row, row.error)["response"]["status_code"] == 400


@pytest.mark.parametrize("failed", [False, True])
def test_line_and_failure_are_read_from_a_record(failed):
    form, row = OpenAIFormat(), completion()
    record = form.failure(row, "no") if failed else form.record(row, answer("a"))
    record = json.loads(json.dumps(record))
    assert form.line_of(record) == 3
    assert form.is_failure(record) is failed
    assert form.tag_of_record(record) == form.tag_of_row(row)


@pytest.mark.parametrize("record", [{}, {"id": "batch_req_3"}, {"id": "x", "response": None}])
def test_other_objects_are_not_records(record):
    assert OpenAIFormat().line_of(record) is None


def entry(text, logprob, rank):
    return SimpleNamespace(decoded_token=text, logprob=logprob, rank=rank)


A, B, C = entry("a", -0.1, 1), entry("é", -2.0, 2), entry("c", float("-inf"), 3)


@pytest.mark.parametrize(
    ("position", "num_top", "chosen", "top"),
    [
        ({1: A, 2: B}, 2, "a", ["a", "é"]),
        ({2: B, 1: A}, 2, "é", ["a", "é"]),
        ({3: C, 1: A, 2: B}, 2, "c", ["a", "é"]),
        ({3: C}, 0, "c", []),
    ],
    ids=["first", "second", "outside", "none"],
)
def test_logprobs_of_a_chat(position, num_top, chosen, top):
    output = answer("x")
    output.outputs[0].logprobs = [position]
    record = OpenAIFormat().record(chat(logprobs=True, top_logprobs=num_top), output)
    (content,) = record["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert content["token"] == chosen
    assert content["bytes"] == list(chosen.encode())
    assert [one["token"] for one in content["top_logprobs"]] == top
    json.dumps(record, allow_nan=False)


def test_logprobs_of_a_completion():
    output = answer("xy")
    output.outputs[0].logprobs = [{120: A}, {121: C, 1: A}]
    record = OpenAIFormat().record(completion(logprobs=1), output)
    assert record["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.1, -9999.0],
        "top_logprobs": [{"a": -0.1}, {"c": -9999.0, "a": -0.1}],
        "text_offset": [0, 1],
    }
