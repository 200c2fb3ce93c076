"""Tool calls of Hermes, Qwen 2.5 and Qwen 3: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

from shmllm.frontend.replies.json_text import read_json
from shmllm.frontend.replies.parser import (
    Format,
    ToolParser,
    Tools,
    call_of,
    call_tag,
    separated,
)
from shmllm.outputs.reply import FunctionCall


class HermesParser(ToolParser):
    begin = "<tool_call>"
    end = "</tool_call>"

    def read(self, body: str) -> list[FunctionCall]:
        return [call_of(read_json(body))]

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [call_tag(tool, f"{cls.begin}\n", f"\n{cls.end}") for tool in tools]
        return separated(tags, "\n", has_one)
