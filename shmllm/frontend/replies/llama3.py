"""Tool calls of Llama 3: a reply of JSON, perhaps behind <|python_tag|>.

{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
"""

from __future__ import annotations

from shmllm.frontend.replies.bare import BareParser
from shmllm.frontend.replies.json_text import DECODER
from shmllm.frontend.replies.parser import (
    Format,
    Tools,
    call_of,
    call_tag,
    separated,
)
from shmllm.outputs.reply import FunctionCall


class Llama3Parser(BareParser):
    begin = "<|python_tag|>"
    opening = "{"

    def read(self, body: str) -> list[FunctionCall]:
        calls, position = [], 0
        while rest := body[position:].lstrip(" \t\r\n;"):
            value, size = DECODER.raw_decode(rest)
            key = "parameters" if "parameters" in value else "arguments"
            calls.append(call_of(value, key))
            position = len(body) - len(rest) + size
        return calls

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [call_tag(tool, arguments="parameters") for tool in tools]
        return separated(tags, "; ", has_one)
