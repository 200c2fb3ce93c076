"""Tool calls of Kimi K2: a name, the number of the call in the conversation, and arguments as JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from shmllm.frontend.replies.deepseek import SectionParser
from shmllm.frontend.replies.parser import Format, Tools, name_of, separated, tag_of

_PREFIX = "functions."


class KimiK2Parser(SectionParser):
    begin = "<|tool_calls_section_begin|>"
    end = "<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>"
    close = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"

    def _split(self, head: str, rest: str) -> tuple[str, str]:
        name = head.strip().removeprefix(_PREFIX).rpartition(":")[0]
        return name or head.strip(), rest

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [
            tag_of(f"{cls.call}{_PREFIX}{name_of(tool)}:0{cls.separator}", tool, cls.close)
            for tool in tools
        ]
        calls = separated(tags, "", has_one)
        return {"type": "tag", "begin": cls.begin, "content": calls, "end": cls.end}
