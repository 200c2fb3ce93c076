"""OpenAI's batch format: rows hold `custom_id` and `body`, records hold `response`.

This module owns the field names of rows and records. The endpoints are /v1/chat/completions and
/v1/completions. The model that a body names has no effect; the response repeats its name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from shmllm.batch import openai_body
from shmllm.batch.rows import JsonObject, Row
from shmllm.errors import RequestError
from shmllm.outputs.request import CompletionOutput, RequestOutput

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LOWEST_LOGPROB = -9999.0
_ID = "batch_req_{}"
_ID_PATTERN = re.compile(r"batch_req_([1-9][0-9]{0,17})")


class OpenAIFormat:
    """Reads rows and makes records in OpenAI's format.

    A record's `id` is "batch_req_" and the number of its line.
    """

    def row(self, line: int, fields: Mapping[str, Any]) -> Row:
        row = Row(line)
        row.identity = {"custom_id": fields.get("custom_id")}
        try:
            self._read(row, fields)
        except RequestError as error:
            row.error = str(error)
        return row

    def record(self, row: Row, output: RequestOutput) -> JsonObject:
        make = _chat_choice if row.request["url"] == CHAT else _text_choice
        body = {
            "id": ("chatcmpl-" if row.request["url"] == CHAT else "cmpl-") + str(row.line),
            "object": "chat.completion" if row.request["url"] == CHAT else "text_completion",
            "created": int(time.time()),
            "model": row.request["model"],
            "choices": [make(row, output, one) for one in output.outputs],
            "usage": _usage(output),
        }
        return self._answer(row, 200, body, None)

    def failure(self, row: Row, message: str) -> JsonObject:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        brief = {"code": "invalid_request_error", "message": message}
        return self._answer(row, 400, {"error": error}, brief)

    def line_of(self, record: JsonObject) -> int | None:
        found = _ID_PATTERN.fullmatch(str(record.get("id")))
        return int(found[1]) if found and "response" in record else None

    def is_failure(self, record: JsonObject) -> bool:
        return record.get("error") is not None

    def tag_of_row(self, row: Row) -> JsonObject:
        return self.tag_of_record(row.identity)

    def tag_of_record(self, record: JsonObject) -> JsonObject:
        return {"custom_id": record.get("custom_id")}

    def _answer(
        self, row: Row, status: int, body: JsonObject, error: JsonObject | None
    ) -> JsonObject:
        return {
            "id": _ID.format(row.line),
            "custom_id": row.identity.get("custom_id"),
            "response": {"status_code": status, "request_id": f"req_{row.line}", "body": body},
            "error": error,
        }

    def _read(self, row: Row, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields.get("custom_id"), str):
            raise RequestError("'custom_id' must be a string")
        if fields.get("method", "POST") != "POST":
            raise RequestError(f"'method' must be 'POST', got {fields['method']!r}")
        url, body = fields.get("url"), fields.get("body")
        if url not in (CHAT, COMPLETIONS):
            raise RequestError(f"'url' must be {CHAT!r} or {COMPLETIONS!r}, got {url!r}")
        if not isinstance(body, dict):
            raise RequestError("'body' must be an object")
        given = {name: value for name, value in body.items() if value is not None}
        read = openai_body.read_chat if url == CHAT else openai_body.read_completion
        row.prompt, row.sampling, row.template = read(given)
        row.defaults = {"temperature": 1.0, "max_tokens": None if url == CHAT else 16}
        row.request = {
            "url": url,
            "model": given.get("model"),
            "echo": given.get("echo", False),
            "most_calls": None if given.get("parallel_tool_calls", True) else 1,
        }


def _usage(output: RequestOutput) -> JsonObject:
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(one.token_ids) for one in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _chat_choice(row: Row, output: RequestOutput, one: CompletionOutput) -> JsonObject:
    num_top = row.sampling.get("logprobs") or 0
    return {
        "index": one.index,
        "message": _message(one, row.request["most_calls"]),
        "logprobs": None if one.logprobs is None else {"content": _chat_logprobs(one, num_top)},
        "finish_reason": "tool_calls" if one.tool_calls else one.finish_reason,
    }


def _message(one: CompletionOutput, most_calls: int | None) -> JsonObject:
    """The reply as a message, with its parts if it has any, and with the first `most_calls` of its
    tool calls, or all."""
    message: JsonObject = {"role": "assistant", "content": one.text}
    if one.content is not None:
        message["content"] = one.content or (None if one.tool_calls else "")
    if one.reasoning:
        message["reasoning"] = one.reasoning
    if one.tool_calls:
        message["tool_calls"] = [call.as_dict() for call in one.tool_calls[:most_calls]]
    return message


def _chat_logprobs(one: CompletionOutput, num_top: int) -> list[JsonObject]:
    """The sampled token of each position, each with its `num_top` most likely alternatives.

    The alternatives include the sampled token only if it is among the most likely ones.
    """
    found = []
    for position in one.logprobs:
        ranked = sorted(position.values(), key=lambda entry: int(entry.rank))
        chosen = _chat_entry(next(iter(position.values())))
        found.append(chosen | {"top_logprobs": [_chat_entry(e) for e in ranked[:num_top]]})
    return found


def _chat_entry(entry: Any) -> JsonObject:
    text = entry.decoded_token or ""
    return {
        "token": text,
        "logprob": max(float(entry.logprob), LOWEST_LOGPROB),
        "bytes": list(text.encode(errors="replace")),
    }


def _text_choice(row: Row, output: RequestOutput, one: CompletionOutput) -> JsonObject:
    prefix = (output.prompt or "") if row.request["echo"] else ""
    return {
        "index": one.index,
        "text": prefix + one.text,
        "logprobs": None if one.logprobs is None else _text_logprobs(one, len(prefix)),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }


def _text_logprobs(one: CompletionOutput, offset: int) -> JsonObject:
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, position in zip(one.token_ids, one.logprobs, strict=True):
        entries = [_chat_entry(entry) for entry in position.values()]
        chosen = _chat_entry(position[token_id])
        columns["tokens"].append(chosen["token"])
        columns["token_logprobs"].append(chosen["logprob"])
        columns["top_logprobs"].append({entry["token"]: entry["logprob"] for entry in entries})
        columns["text_offset"].append(offset)
        offset += len(chosen["token"])
    return columns
