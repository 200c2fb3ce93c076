"""Tool calls as a JSON list behind a mark: the base of such formats.

<TOOLCALL>[{"name": "f", "arguments": {...}}, {"name": "g", "arguments": {...}}]</TOOLCALL>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from shmllm.frontend.replies.json_text import read_json
from shmllm.frontend.replies.parser import (
    Format,
    ToolParser,
    Tools,
    call_of,
    name_of,
    separated,
    tag_of,
)
from shmllm.outputs.reply import FunctionCall


class JsonListParser(ToolParser):
    """
    Attributes:
        name_key, arguments_key: what a call has its name and its arguments under.
        opens, between, closes: what is around and between forced calls, behind the mark.
    """

    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"
    opens: ClassVar[str] = "["
    between: ClassVar[str] = ", "
    closes: ClassVar[str] = "]"

    def read(self, body: str) -> list[FunctionCall]:
        values = read_json(body)
        if not isinstance(values, list) or not values:
            raise ValueError("no calls")
        return [self._call(value) for value in values]

    def _call(self, value: Any) -> FunctionCall:
        return call_of(value, self.arguments_key, self.name_key)

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        return {
            "type": "tag",
            "begin": cls.begin + cls.opens,
            "content": separated([cls._tag(tool) for tool in tools], cls.between, has_one),
            "end": cls.closes + cls.end,
        }

    @classmethod
    def _tag(cls, tool: Mapping[str, Any]) -> Format:
        """The format of a forced call in the list."""
        name = json.dumps(name_of(tool))
        return tag_of(f'{{"{cls.name_key}": {name}, "{cls.arguments_key}": ', tool, "}")


class ToolCallsParser(JsonListParser):
    """Jamba, Apriel and others."""

    begin = "<tool_calls>"
    end = "</tool_calls>"
