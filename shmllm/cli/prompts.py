"""Prompts from the command line, from a file, or from a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import click

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class InputPrompt:
    """
    Attributes:
        content: a text or {"prompt_token_ids": ...} to complete, or messages to answer.
        origin: how to name it in an error: "line 3 of prompts.txt".
        carried: further fields of its JSON line, which the result gets back.
    """

    content: str | dict[str, Any] | Messages
    origin: str
    carried: dict[str, Any] = field(default_factory=dict)


def read_prompts(
    prompts: tuple[str, ...], source: TextIO | None, *, chat: bool, system: str | None
) -> list[InputPrompt]:
    """All prompts of a command.

    Raises:
        click.UsageError: there is none, or there are two sources.
    """
    if prompts and source is not None:
        raise click.UsageError("give prompts as arguments or with --input, not both")
    if source is not None:
        found = _read_file(source)
    elif prompts:
        found = [InputPrompt(p, f"prompt {i + 1}") for i, p in enumerate(prompts)]
    elif sys.stdin is not None and not sys.stdin.isatty():
        found = [InputPrompt(sys.stdin.read(), "standard input")]
    else:
        raise click.UsageError('no prompt; try: shmllm generate "def fibonacci(n):"')
    if not found:
        raise click.UsageError("the input holds no prompt")
    return [_as_chat(item, system) for item in found] if chat else found


def _read_file(source: TextIO) -> list[InputPrompt]:
    try:
        return list(_read_lines(source))
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source.name} is not UTF-8: {error.reason}") from error


def _as_chat(item: InputPrompt, system: str | None) -> InputPrompt:
    opening: Messages = [{"role": "system", "content": system}] if system is not None else []
    if isinstance(item.content, dict):
        raise click.UsageError(
            f"{item.origin}: neither token ids nor a cache_salt go with chat messages"
        )
    if isinstance(item.content, list):
        return replace(item, content=[*opening, *item.content])
    return replace(item, content=[*opening, {"role": "user", "content": item.content}])


def _read_lines(source: TextIO) -> Iterator[InputPrompt]:
    """JSON lines if the name ends in .jsonl or the first line that is not blank is a JSON
    object, else a prompt a line."""
    is_json = True if source.name.endswith(".jsonl") else None
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        if is_json is None:
            is_json = line.lstrip().startswith("{") and _is_json_object(line)
        origin = f"line {number} of {source.name}"
        yield _parse_record(line, origin) if is_json else InputPrompt(line.rstrip("\r\n"), origin)


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parse_record(line: str, origin: str) -> InputPrompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise click.UsageError(f"{origin} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise click.UsageError(f"{origin} is not a JSON object")
    for key, kind in (("prompt", str), ("messages", list), ("prompt_token_ids", list)):
        if key in record:
            if not isinstance(record[key], kind):
                raise click.UsageError(f"{origin}: {key!r} must be a {kind.__name__}")
            content = record[key]
            if key != "messages" and (key == "prompt_token_ids" or "cache_salt" in record):
                content = {name: record[name] for name in (key, "cache_salt") if name in record}
            used = {"prompt", "messages", "prompt_token_ids", "cache_salt"}
            return InputPrompt(content, origin, {k: v for k, v in record.items() if k not in used})
    raise click.UsageError(f"{origin} has none of 'prompt', 'messages', 'prompt_token_ids'")
