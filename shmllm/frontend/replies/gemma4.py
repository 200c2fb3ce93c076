"""Tool calls and reasoning of Gemma 4, which has a mark in place of quotes:

<|channel>thought
...<channel|><|tool_call>call:f{city:<|"|>Oslo<|"|>,days:2}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shmllm.frontend.replies.arguments import (
    NotEnforcedError,
    Spelling,
    constant,
    optional,
    refuse_but,
    sequence,
)
from shmllm.frontend.replies.json_text import write_json
from shmllm.frontend.replies.literals import LiteralReader
from shmllm.frontend.replies.parser import (
    Format,
    ReasoningParser,
    ToolParser,
    Tools,
    name_of,
    separated,
)
from shmllm.outputs.reply import FunctionCall

_QUOTE = '<|"|>'
_NAME = re.compile(r"call:([^\s{]+)")
_KEY = re.compile(r"[^:{}\[\],\s]+")
_OF_STRINGS = frozenset({"type", "maxLength"})
_OF_LISTS = frozenset({"type", "items", "minItems", "maxItems"})
_MOST_ITEMS = 1000
"""The length of a list for which a schema has no bound."""


class _ArgumentReader(LiteralReader):
    def string(self) -> str | None:
        if not self.takes(_QUOTE):
            return None
        end = self.text.index(_QUOTE, self.position)
        found = self.text[self.position : end]
        self.position = end + len(_QUOTE)
        return found

    def key(self) -> str:
        found = self.string()
        return self.word(_KEY) if found is None else found


class _GemmaSpelling(Spelling):
    """Keys are in alphabetical order, as the model's template writes them."""

    assigns = ":"

    def constant(self, value: Any) -> str:
        match value:
            case str():
                return f"{_QUOTE}{value}{_QUOTE}"
            case dict():
                items = (f"{key}:{self.constant(each)}" for key, each in sorted(value.items()))
                return f"{{{','.join(items)}}}"
            case list():
                return f"[{','.join(map(self.constant, value))}]"
        return "None" if value is None else json.dumps(value)

    def string(self, schema: Mapping[str, Any]) -> Format:
        refuse_but(_OF_STRINGS, schema)
        text: Format = {"type": "any_text", "max_chars": schema.get("maxLength")}
        return {"type": "tag", "begin": _QUOTE, "content": text, "end": _QUOTE}

    def other(self, schema: Mapping[str, Any]) -> Format:
        match schema.get("type"):
            case "object":
                return sequence(constant("{"), self.fields(schema), constant("}"))
            case "array":
                return self._list(schema)
        refuse_but(frozenset({"type"}), schema)
        raise NotEnforcedError(f"the type {schema.get('type')!r}")

    def _list(self, schema: Mapping[str, Any]) -> Format:
        refuse_but(_OF_LISTS, schema)
        given = schema.get("items", True)
        item = self.value({} if given is True else given)
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST_ITEMS)
        if most < 1:
            return constant("[]")
        more: Format = {
            "type": "repeat",
            "content": sequence(constant(","), item),
            "min": max(least - 1, 0),
            "max": most - 1,
        }
        items = sequence(item, more)
        return sequence(constant("["), items if least else optional(items), constant("]"))

    def in_order(self, properties: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(sorted(properties.items()))


_SPELLING = _GemmaSpelling()


class Gemma4Reasoning(ReasoningParser):
    begin = "<|channel>thought"
    end = "<channel|>"


class Gemma4Parser(ToolParser):
    begin = "<|tool_call>"
    end = "<tool_call|>"

    def read(self, body: str) -> list[FunctionCall]:
        reader = _ArgumentReader(body)
        name = reader.word(_NAME).removeprefix("call:")
        arguments = reader.value()
        if not isinstance(arguments, dict) or not reader.is_at_end():
            raise ValueError("no arguments")
        return [FunctionCall(name, write_json(arguments))]

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags: list[Format] = [
            {
                "type": "tag",
                "begin": f"{cls.begin}call:{name_of(tool)}{{",
                "content": _SPELLING.arguments(tool),
                "end": f"}}{cls.end}",
            }
            for tool in tools
        ]
        return separated(tags, "", has_one)
