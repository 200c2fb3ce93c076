"""Tool calls of Llama 3: a reply of JSON, perhaps behind <|python_tag|>.

{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
"""

from __future__ import annotations

import json

from shmllm.frontend.replies.json_text import DECODER
from shmllm.frontend.replies.parser import (
    Format,
    ToolParser,
    Tools,
    call_of,
    name_of,
    separated,
    tag_of,
)
from shmllm.outputs.reply import FunctionCall, Reply


class Llama3Parser(ToolParser):
    """A reply that does not begin with a brace or the mark is content."""

    begin = "<|python_tag|>"
    _is_decided = False
    _is_bare = False

    def feed(self, text: str) -> Reply:
        if not self._is_decided:
            self._rest += text
            begun = self._rest.lstrip()
            if self.begin.startswith(begun):  # all of it so far
                return Reply()
            self._is_decided, text = True, ""
            if begun.startswith("{"):
                self._body, self._is_bare = "", True
        return super().feed(text)

    def read(self, body: str) -> list[FunctionCall]:
        calls, position = [], 0
        while rest := body[position:].lstrip(" \t\r\n;"):
            value, size = DECODER.raw_decode(rest)
            key = "parameters" if "parameters" in value else "arguments"
            calls.append(call_of(value, key))
            position = len(body) - len(rest) + size
        return calls

    def _spell(self, body: str, end: str) -> str:
        return body if self._is_bare else super()._spell(body, end)

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [
            tag_of(f'{{"name": {json.dumps(name_of(tool))}, "parameters": ', tool, "}")
            for tool in tools
        ]
        return separated(tags, "; ", has_one)
