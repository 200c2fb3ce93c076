"""Checks the messages and the tools of a conversation, and copies them for a chat template.

This module gives templates what they expect of each kind of message: texts, parsed arguments of
tool calls, and reasoning under all of its names. It must not know templates.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.items import Modality

logger = logging.getLogger(__name__)

ITEM_PARTS: dict[Modality, dict[str, str]] = {
    "image": {"type": "image"},
    "audio": {"type": "audio", "audio": ""},  # templates read one or the other
    "video": {"type": "video"},
}
"""The parts of a content that stand for items, by modality; `chat_items` makes them."""

Marks = Mapping[Modality, str]

_TEXT_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The types of parts that are texts, and the fields with the texts."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Templates read one of these names, and callers use one of them."""


def checked_messages(
    messages: object, *, keep_parts: bool, marks: Marks | None = None
) -> list[dict[str, Any]]:
    """Copies of the messages of a conversation, for a template.

    Args:
        messages: dicts with `role` and `content`. Fields that are None count as missing.
        keep_parts: keep contents that are lists of parts; otherwise they become one text.
        marks: what stands for an item in a text, by modality; None: parts are texts only.

    Raises:
        RequestError: a message is malformed.
    """
    if not isinstance(messages, (list, tuple)):
        raise RequestError(
            f"messages must be a list of dicts with role and content, got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one message")
    return [
        _checked_message(message, f"messages[{position}]", keep_parts, marks)
        for position, message in enumerate(messages)
    ]


def _checked_message(
    message: object, where: str, keep_parts: bool, marks: Marks | None
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} must be a dict with role and content, got {type(message).__name__}"
        )
    present = {key: value for key, value in message.items() if value is not None}
    copied: dict[str, Any] = json_copy(present, where)
    if not isinstance(copied.get("role"), str):
        raise RequestError(f"{where} has no role; give a str such as 'user'")
    if "content" in copied:
        content = copied["content"]
        copied["content"] = _checked_content(content, f"{where}.content", keep_parts, marks)
    elif not copied.get("tool_calls"):
        raise RequestError(f"{where} has no content; give a str or a list of text parts")
    reasoning = [copied.pop(name) for name in _REASONING_FIELDS if name in copied]
    if copied["role"] == "assistant":
        if reasoning:
            copied |= dict.fromkeys(_REASONING_FIELDS, reasoning[0])
        _parse_tool_calls(copied, where)
    return copied


def _parse_tool_calls(message: dict[str, Any], where: str) -> None:
    """Give the tool calls of an assistant's message arguments that are dicts, in place, and remove
    an empty list of calls.

    Arguments that are no JSON object become {}: an error would end a conversation for a mistake
    that the model made in an earlier turn.
    """
    calls = message.get("tool_calls")
    if calls is not None and not calls:
        del message["tool_calls"]
    for position, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(
                f'{where}.tool_calls[{position}] must be {{"type": "function", "function": '
                '{"name": ..., "arguments": ...}}'
            )
        function["arguments"] = _arguments(function.get("arguments"), f"{where}.tool_calls")


def _arguments(given: Any, where: str) -> dict[str, Any]:
    if not given:
        return {}
    try:
        parsed = _encodable(json.loads(given) if isinstance(given, str) else given)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    logger.warning("%s has arguments that are no JSON object; the template gets {}", where)
    return {}


def _encodable(parsed: Any) -> Any:
    """The value, with "?" in place of unpaired surrogates, which no prompt can contain."""
    text = json.dumps(parsed, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode(errors="replace"))
    return parsed


def _checked_content(content: object, where: str, keep_parts: bool, marks: Marks | None) -> object:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"{where} must be a str or a list of text parts, got {type(content).__name__}"
        )
    parts = [
        part
        if marks is not None and part in ITEM_PARTS.values()
        else _text_part(part, f"{where}[{position}]")
        for position, part in enumerate(content)
    ]
    if keep_parts:
        return parts
    texts = [
        part["text"] if part["type"] == "text" else (marks or {})[part["type"]] for part in parts
    ]
    return "\n".join(texts)


def _text_part(part: Any, where: str) -> dict[str, Any]:
    """A part as {"type": "text", "text": ...}, with its further fields. A str is a text, too, and
    so is a part without a type that has a text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else None
    field = _TEXT_KINDS.get(kind) if isinstance(kind, str) else None
    text = None if field is None else part.get(field)
    if not isinstance(text, str):
        raise RequestError(
            f'{where} must be a str or {{"type": "text", "text": ...}}, got {_shown(part)}; other '
            "kinds of content are not supported"
        )
    others = {name: value for name, value in part.items() if name != field}
    return {**others, "type": "text", "text": text}


def _shown(part: object) -> str:
    """What a part is, in few words: it may contain a whole image."""
    if not isinstance(part, dict):
        return f"a value of the type {type(part).__name__}"
    if "type" in part:
        return f"a part of the type {str(part['type'])[:40]!r}"
    return f"a part with the fields {', '.join(part)[:80]}" if part else "an empty part"


def checked_tools(tools: object) -> list[Any] | None:
    """Copies of the JSON schemas of tools. Raises RequestError."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(t, Mapping) for t in tools):
        raise RequestError("tools must be a list of dicts, each a tool's JSON schema")
    return [json_copy(tool, f"tools[{position}]") for position, tool in enumerate(tools)]


def json_copy(value: object, where: str) -> Any:
    """A copy that consists of JSON types, so that a template cannot call the caller's methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {json_copy(key, where): json_copy(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_copy(item, where) for item in value]
    raise RequestError(
        f"{where} holds a {type(value).__name__}; a chat template takes only what JSON can hold"
    )
