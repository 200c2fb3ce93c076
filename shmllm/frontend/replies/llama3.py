"""Tool calls of Llama 3: a reply of JSON, perhaps behind <|python_tag|>.

{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
"""

from __future__ import annotations

import json

from shmllm.frontend.replies.bare import BareParser
from shmllm.frontend.replies.json_text import DECODER
from shmllm.frontend.replies.parser import (
    Format,
    Tools,
    call_of,
    name_of,
    separated,
    tag_of,
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
        tags = [
            tag_of(f'{{"name": {json.dumps(name_of(tool))}, "parameters": ', tool, "}")
            for tool in tools
        ]
        return separated(tags, "; ", has_one)
