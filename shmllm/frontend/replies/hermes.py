"""Tool calls of Hermes, Qwen 2.5 and Qwen 3: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

import json

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


class HermesParser(ToolParser):
    begin = "<tool_call>"
    end = "</tool_call>"

    def read(self, body: str) -> list[FunctionCall]:
        return [call_of(read_json(body))]

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [
            tag_of(
                f'{cls.begin}\n{{"name": {json.dumps(name_of(tool))}, "arguments": ',
                tool,
                f"}}\n{cls.end}",
            )
            for tool in tools
        ]
        return separated(tags, "\n", has_one)
