"""Tool calls and reasoning of Cohere's models. Command R7B, Command A and later ones write:

<|START_THINKING|>...<|END_THINKING|><|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "f", "parameters": {...}}
]<|END_ACTION|>

An answer is between <|START_RESPONSE|> and <|END_RESPONSE|>, of later models between <|START_TEXT|>
and <|END_TEXT|>. The Command R of 2024 write:

Action:
```json
[{"tool_name": "f", "parameters": {...}}]```
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shmllm.frontend.replies.json_list import JsonListParser
from shmllm.frontend.replies.parser import (
    Format,
    ReasoningParser,
    Tools,
    name_of,
    schema_of,
    tag_of,
)

_FRAME = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class CohereReasoning(ReasoningParser):
    begin = "<|START_THINKING|>"
    end = "<|END_THINKING|>"
    frame = _FRAME


class CohereParser(JsonListParser):
    begin = "<|START_ACTION|>"
    end = "<|END_ACTION|>"
    frame = _FRAME
    name_key = "tool_name"
    arguments_key = "parameters"
    opens = "[\n    "
    between = ",\n    "
    closes = "\n]"

    @classmethod
    def _tag(cls, tool: Mapping[str, Any]) -> Format:
        name = f'", "tool_name": {json.dumps(name_of(tool))}, "parameters": '
        elements: list[Format] = [
            {"type": "regex", "pattern": "[0-9]{1,4}"},
            {"type": "const_string", "value": name},
            schema_of(tool),
        ]
        content: Format = {"type": "sequence", "elements": elements}
        return {"type": "tag", "begin": '{"tool_call_id": "', "content": content, "end": "}"}


class CommandRParser(JsonListParser):
    """Other blocks of JSON are content."""

    begin = "```json"
    end = "```"
    frame = ("Action:",)
    name_key = "tool_name"
    arguments_key = "parameters"
    opens = "\n[\n"
    between = ",\n"
    closes = "\n]"

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        calls = super().forced(tools, has_one)
        return calls | {"begin": f"{cls.frame[0]}\n{calls['begin']}"}

    @classmethod
    def _tag(cls, tool: Mapping[str, Any]) -> Format:
        head = f'        "{cls.name_key}": {json.dumps(name_of(tool))},\n'
        begin = f'    {{\n{head}        "{cls.arguments_key}": '
        return tag_of(begin, tool, "\n    }")
