"""gpt-oss: a reply of several messages, each with a channel (OpenAI's harmony format).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The channel "analysis" is reasoning, a message to a function is a call of it, and all others are
content. The prompt has the <|start|>assistant of the first message.
"""

from __future__ import annotations

import re

from shmllm.frontend.replies.json_text import read_json
from shmllm.frontend.replies.marks import Section, cut_at_mark
from shmllm.frontend.replies.parser import (
    Format,
    ReasoningParser,
    ReplyParser,
    Tools,
    name_of,
    new_id,
    tag_of,
)
from shmllm.outputs.reply import FunctionCall, Reply, ToolCall

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyReasoning(ReasoningParser):
    """The marks of the analysis, which HarmonyParser reads."""

    begin = "<|channel|>analysis<|message|>"
    end = "<|end|>"

    @classmethod
    def is_open_after(cls, prompt: str) -> bool:
        return False

    @classmethod
    def lead(cls, is_open: bool) -> list[Format]:
        tag: Format = {
            "type": "tag",
            "begin": cls.begin,
            "content": {"type": "any_text"},
            "end": f"{cls.end}<|start|>assistant",
        }
        return [{"type": "optional", "content": tag}]


class HarmonyParser(ReplyParser):
    """Reads all messages of a reply.

    Args:
        has_reasoning: whether the analysis is reasoning; otherwise it is content.
        has_calls: whether messages to functions are calls; otherwise they are content.
    """

    def __init__(self, has_reasoning: bool = True, has_calls: bool = True) -> None:
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls
        self._rest = self._header = ""
        self._message: _Message | None = None
        self._num_calls = 0
        self._written: set[str] = set()

    def feed(self, text: str) -> Reply:
        self._rest += text
        reply = Reply()
        while self._step(reply):
            pass
        return reply

    def finish(self) -> Reply:
        reply = Reply()
        rest, self._rest = self._rest, ""
        if self._message is None:
            plain = self._header + rest
            if not plain or "<|" in plain or plain == "assistant":
                return reply
            self._message, rest = _Message("content"), plain
        self._show(self._message, self._message.section.add(rest), reply)
        self._end(self._message, reply)
        self._show(self._message, self._message.section.end(), reply)
        return reply

    def _step(self, reply: Reply) -> bool:
        """Read a header, or a text up to its end. Returns whether there was one."""
        if self._message is None:
            before, mark, self._rest = cut_at_mark(self._rest, [_MESSAGE])
            self._header += before
            if mark:
                self._message, self._header = self._begin(self._header), ""
            return bool(mark)
        before, mark, self._rest = cut_at_mark(self._rest, _ENDS)
        self._show(self._message, self._message.section.add(before), reply)
        if mark:
            self._end(self._message, reply)
            self._message = None
        return bool(mark)

    def _begin(self, header: str) -> _Message:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._has_calls:
            return _Message("call", recipient[1])
        is_analysis = channel is not None and channel[1] == "analysis"
        return _Message("reasoning" if is_analysis and self._has_reasoning else "content")

    def _show(self, message: _Message, text: str, reply: Reply) -> None:
        """Add text of a message. Each message begins on a line of its own."""
        if not text:
            return
        if message.kind == "call":
            message.arguments += text
            return
        if not message.is_shown and message.kind in self._written:
            text = "\n" + text
        message.is_shown = True
        self._written.add(message.kind)
        reply.add(Reply(text) if message.kind == "reasoning" else Reply(content=text))

    def _end(self, message: _Message, reply: Reply) -> None:
        """Add the call of a message to a function. What is no JSON is content."""
        if message.kind != "call":
            return
        try:
            read_json(message.arguments)
        except (ValueError, RecursionError):
            message.kind = "content"
            self._show(message, message.arguments, reply)
            return
        call = FunctionCall(message.name, message.arguments)
        reply.tool_calls.append(ToolCall(new_id(), call, index=self._num_calls))
        self._num_calls += 1

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        """One call: the format has no more in a reply."""
        head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
        tags = [tag_of(head.format(name_of(tool)), tool, "") for tool in tools]
        return {"type": "or", "elements": tags}


class _Message:
    """A message that is being read.

    Args:
        kind: "reasoning", "content" or "call".
        name: the name of the function.
    """

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind = kind
        self.name = name
        self.arguments = ""
        self.is_shown = False
        self.section = Section(is_open=kind != "call")
