"""What reads a reply: the interfaces of the parsers, and their combination.

A parser reads one reply, in pieces or as a whole, with the same result. Its text contains special
tokens, which are the marks of some formats. This module must not know models.
"""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from shmllm.frontend.replies.json_text import write_json
from shmllm.frontend.replies.marks import Section, cut_at_mark
from shmllm.outputs.reply import FunctionCall, Reply, ToolCall

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Templates of Mistral refuse ids of another length."""

Tools = Sequence[Mapping[str, Any]]
Format = dict[str, Any]
"""A format of a structural tag."""


class ReplyParser(ABC):
    """Reads one reply."""

    @abstractmethod
    def feed(self, text: str) -> Reply:
        """Read the next piece. Returns what became certain with it."""

    @abstractmethod
    def finish(self) -> Reply:
        """The reply ends here. Returns the rest."""

    def parse(self, text: str) -> Reply:
        """Read a whole reply."""
        reply = self.feed(text)
        reply.add(self.finish())
        return reply


class ReasoningParser(ReplyParser):
    """Reads reasoning at the beginning of a reply; the rest is content.

    Attributes:
        begin: the text that begins reasoning.
        end: the text that ends it.
        stops: texts that end it as well, and belong to what follows.
        frame: texts around the content of a reply, which are no part of it.
        is_assumed: whether a reply begins inside of reasoning unless the prompt ended it.

    Args:
        is_open: whether the prompt began it already.
    """

    begin: ClassVar[str]
    end: ClassVar[str]
    stops: ClassVar[tuple[str, ...]] = ()
    frame: ClassVar[tuple[str, ...]] = ()
    is_assumed: ClassVar[bool] = False

    def __init__(self, is_open: bool = False) -> None:
        self._is_open = is_open
        self._has_begun = is_open
        self._is_over = False
        self._rest = ""
        self._reasoning, self._content = Section(is_open=False), Section()

    def feed(self, text: str) -> Reply:
        self._rest += text
        if not self._has_begun:
            self._look_for_begin()
        if self._is_over:
            return Reply(content=self._take_content())
        if not self._is_open:
            return Reply()
        before, mark, self._rest = cut_at_mark(self._rest, [self.end, *self.stops])
        reply = Reply(self._reasoning.add(before))
        if mark:
            self._rest = (mark if mark in self.stops else "") + self._rest
            self._is_open, self._is_over = False, True
            self._content.cut()
            reply.content = self._take_content()
        return reply

    def finish(self) -> Reply:
        rest, self._rest = self._rest, ""
        if self._is_open:
            return Reply(self._reasoning.add(rest) + self._reasoning.end())
        return Reply(content=self._content.add(rest) + self._content.end())

    def _look_for_begin(self) -> None:
        begun = self._rest.lstrip()
        if begun.startswith(self.begin):
            self._rest = begun.removeprefix(self.begin)
            self._is_open = self._has_begun = True
        elif not self.begin.startswith(begun):
            self._is_over = self._has_begun = True

    def _take_content(self) -> str:
        rest, self._rest = self._rest, ""
        return self._content.add(rest)

    @classmethod
    def is_open_after(cls, prompt: str) -> bool:
        """Whether a reply to this prompt begins inside of reasoning."""
        begin, end = prompt.rfind(cls.begin), prompt.rfind(cls.end)
        return begin > end or (cls.is_assumed and end < 0)

    @classmethod
    def lead(cls, is_open: bool) -> list[Format]:
        """What may or must come before anything else of a reply, for a structural tag."""
        inside = {"type": "any_text"}
        if is_open:
            end = {"type": "const_string", "value": cls.end}
            return [inside, end, BLANKS]
        tag = {"type": "tag", "begin": cls.begin, "content": inside, "end": cls.end}
        content = {"type": "sequence", "elements": [tag, BLANKS]}
        return [{"type": "optional", "content": content}]


BLANKS: Format = {"type": "regex", "pattern": r"\n{0,2}"}


class ToolParser(ReplyParser):
    """Reads the tool calls in a reply without reasoning. Between two marks is a text with calls.

    A text between marks that has no calls is content, with its marks.

    Attributes:
        begin: the text that begins calls.
        end: the text that ends them; "" for the end of the reply.
        frame: texts around the content of a reply, which are no part of it.

    Args:
        tools: the tools that may be called, as OpenAI defines them.
    """

    begin: ClassVar[str]
    end: ClassVar[str] = ""
    frame: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Tools = ()) -> None:
        self._tools = tools
        self._rest = ""
        self._body: str | None = None
        self._content = Section()
        self._num_calls = 0

    @abstractmethod
    def read(self, body: str) -> list[FunctionCall]:
        """The calls in a text between marks.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it has none.
        """

    def ids(self, body: str, calls: Sequence[FunctionCall]) -> list[str]:
        """The ids of the calls in a text: new ones, where the model writes none."""
        return [new_id() for _ in calls]

    @classmethod
    @abstractmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        """A format of a structural tag that is one call, or one and perhaps more."""

    def feed(self, text: str) -> Reply:
        self._rest += text
        reply = Reply()
        while self._step(reply):
            pass
        return reply

    def finish(self) -> Reply:
        reply = Reply()
        if self._body is not None:
            self._take_calls(self._body + self._rest, "", reply)
            self._rest = ""
        reply.content += self._content.add(self._rest) + self._content.end()
        self._rest = ""
        return reply

    def _step(self, reply: Reply) -> bool:
        """Read up to the next mark. Returns whether there was one."""
        if self._body is None:
            before, mark, self._rest = cut_at_mark(self._rest, [self.begin])
            reply.content += self._content.add(before)
            self._body = "" if mark else None
            return bool(mark)
        if not self.end:
            self._body, self._rest = self._body + self._rest, ""
            return False
        before, mark, self._rest = cut_at_mark(self._rest, [self.end])
        self._body += before
        if mark:
            self._take_calls(self._body, mark, reply)
        return bool(mark)

    def _take_calls(self, body: str, end: str, reply: Reply) -> None:
        self._body = None
        try:
            calls = self.read(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            reply.content += self._content.add(self._spell(body, end))
            return
        self._content.cut()
        for call_id, call in zip(self.ids(body, calls), calls, strict=True):
            reply.tool_calls.append(ToolCall(call_id, call, index=self._num_calls))
            self._num_calls += 1

    def _spell(self, body: str, end: str) -> str:
        """A text between marks as the model wrote it."""
        return self.begin + body + end


class TwoParsers(ReplyParser):
    """Reads a part of a reply, such as reasoning, and another part in the rest of it.

    Args:
        first: reads the reply.
        second: reads the content that `first` finds.
    """

    def __init__(self, first: ReplyParser, second: ReplyParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> Reply:
        return self._read_rest(self._first.feed(text))

    def finish(self) -> Reply:
        reply = self._read_rest(self._first.finish())
        reply.add(self._second.finish())
        return reply

    def _read_rest(self, reply: Reply) -> Reply:
        found = self._second.feed(reply.content)
        reply.content = ""
        reply.add(found)
        return reply


def new_id() -> str:
    """A random id for a call."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def call_of(value: Any, arguments: str = "arguments", name: str = "name") -> FunctionCall:
    """The call that a JSON object with a name and arguments, under these keys, describes.

    Raises:
        ValueError: it describes none.
    """
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise ValueError("no call")
    found = value.get(arguments, {})
    return FunctionCall(value[name], found if isinstance(found, str) else write_json(found))


def schema_of(tool: Mapping[str, Any]) -> Format:
    """The format of a tool's arguments."""
    schema = function_of(tool).get("parameters") or {"type": "object", "properties": {}}
    return {"type": "json_schema", "json_schema": schema}


def tag_of(begin: str, tool: Mapping[str, Any], end: str) -> Format:
    """A tag around the arguments of a tool."""
    return {"type": "tag", "begin": begin, "content": schema_of(tool), "end": end}


def call_tag(
    tool: Mapping[str, Any], begin: str = "", end: str = "", arguments: str = "arguments"
) -> Format:
    """A tag around a call as a JSON object with a name and, under this key, arguments."""
    name = json.dumps(name_of(tool))
    return tag_of(f'{begin}{{"name": {name}, "{arguments}": ', tool, f"}}{end}")


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool."""
    return str(function_of(tool).get("name", ""))


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The name, description and parameters of a tool."""
    found = tool.get("function", tool)
    return found if isinstance(found, Mapping) else {}


def separated(tags: list[Format], separator: str, has_one: bool) -> Format:
    """One of the tags, or one and perhaps more."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": has_one,
    }
