"""Tool calls of Kimi K2: a name, the number of the call in the conversation, and arguments as JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.frontend.replies.deepseek import SectionParser
from shmllm.frontend.replies.parser import Format, Tools, name_of, schema_of, separated
from shmllm.outputs.reply import FunctionCall

_PREFIX = "functions."
_SEPARATOR = "<|tool_call_argument_begin|>"
_NUMBER: tuple[Format, ...] = (
    {"type": "regex", "pattern": "[0-9]{1,4}"},
    {"type": "const_string", "value": _SEPARATOR},
)


class KimiK2Parser(SectionParser):
    begin = "<|tool_calls_section_begin|>"
    end = "<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>"
    close = "<|tool_call_end|>"
    separator = _SEPARATOR

    def _split(self, head: str, rest: str) -> tuple[str, str]:
        name = head.strip().removeprefix(_PREFIX).rpartition(":")[0]
        return name or head.strip(), rest

    def ids(self, body: str, calls: Sequence[FunctionCall]) -> list[str]:
        """The names with their numbers, which the model's templates repeat with the results."""
        return [call.partition(self.separator)[0].strip() for call in body.split(self.call)[1:]]

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [
            {
                "type": "tag",
                "begin": f"{cls.call}{_PREFIX}{name_of(tool)}:",
                "content": {"type": "sequence", "elements": [*_NUMBER, schema_of(tool)]},
                "end": cls.close,
            }
            for tool in tools
        ]
        calls = separated(tags, "", has_one)
        return {"type": "tag", "begin": cls.begin, "content": calls, "end": cls.end}
