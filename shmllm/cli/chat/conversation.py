"""A conversation: its messages, and the files that hold one.

A Conversation never changes: each step gives a new one, so whatever fails leaves the old one as it
was. This module must not know how messages are read, answered or shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from shmllm.errors import RequestError

Message = dict[str, Any]
Part = dict[str, Any]
Call = dict[str, Any]
"""A tool call in OpenAI's form, with `id` and `function`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """
    Attributes:
        messages: dicts with `role` and `content`, the oldest first; a system message comes first.
            A content with items is a list of parts, in OpenAI's form.
    """

    messages: tuple[Message, ...] = ()

    @classmethod
    def with_system(cls, system: str | None) -> Self:
        """An empty conversation with this system message; None for none."""
        return cls().under(system or "")

    @property
    def num_messages(self) -> int:
        """The number of messages besides the system message."""
        return len(self.messages) - len(self._system())

    def under(self, system: str) -> Self:
        """The same conversation with this system message; without one if the text is empty."""
        first = [{"role": "system", "content": system}] if system else []
        return self._of([*first, *self.messages[len(self._system()) :]])

    def begun_again(self) -> Self:
        """A new conversation with the same system message."""
        return self._of(self._system())

    def asked(self, text: str, items: Sequence[Part] = ()) -> Self:
        """The conversation with the user's next message.

        Args:
            text: the message.
            items: the parts that come before its text.
        """
        content = [*items, {"type": "text", "text": text}] if items else text
        return self._of([*self.messages, {"role": "user", "content": content}])

    def answered(self, text: str, reasoning: str = "", calls: Sequence[Call] = ()) -> Self:
        """The conversation with the answer to its last message.

        Args:
            text: the answer.
            reasoning: what the model wrote before it.
            calls: its tool calls.
        """
        message: Message = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = list(calls)
        return self._of([*self.messages, message])

    @property
    def open_calls(self) -> list[Call]:
        """The tool calls of the last answer that have no result yet."""
        done: set[str] = set()
        for message in reversed(self.messages):
            if message["role"] != "tool":
                calls = message.get("tool_calls") or []
                return [call for call in calls if call["id"] not in done]
            done.add(str(message.get("tool_call_id")))
        return []

    def resulted(self, text: str) -> Self:
        """The conversation with the result of the first open tool call.

        Raises:
            RequestError: no tool call is open.
        """
        if not self.open_calls:
            raise RequestError("no tool call waits for a result")
        call = self.open_calls[0]
        message = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
        return self._of([*self.messages, {**message, "content": text}])

    def unanswered(self) -> Self:
        """The conversation up to the user's last message, or to the last results of tools.

        Raises:
            RequestError: there is none, or something else than an answer follows it.
        """
        kept = list(self.messages)
        if kept and kept[-1]["role"] == "assistant":
            kept.pop()
        found = self._of(kept)
        if not kept or kept[-1]["role"] not in ("user", "tool") or found.open_calls:
            raise RequestError("no message to answer again")
        return found

    def to_json(self) -> str:
        """One line with the object {"messages": [...]}: a row of a batch file, too."""
        return json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> Self:
        """Read what `to_json` wrote, or a list of messages.

        Args:
            text: the JSON text.
            name: what errors call it.

        Raises:
            RequestError: the text is something else.
        """
        try:
            value = json.loads(text)
        except ValueError as error:
            raise RequestError(f"{name} is not JSON: {error}") from error
        messages = value.get("messages") if isinstance(value, dict) else value
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise RequestError(
                f'{name} must hold {{"messages": [...]}}, each a dict with role and content'
            )
        return cls(tuple(messages))

    def _system(self) -> tuple[Message, ...]:
        return self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else ()

    def _of(self, messages: Iterable[Message]) -> Self:
        return type(self)(tuple(messages))


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    return isinstance(content, str)
