"""Tool calls of Mistral: [TOOL_CALLS] and a JSON list, or a name and arguments behind each mark.

[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{...}
"""

from __future__ import annotations

import re
from typing import ClassVar

from shmllm.frontend.replies.json_text import read_json, write_json
from shmllm.frontend.replies.parser import (
    Format,
    ToolParser,
    Tools,
    call_of,
    call_tag,
    name_of,
    schema_of,
    separated,
)
from shmllm.outputs.reply import FunctionCall

_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser(ToolParser):
    begin = "[TOOL_CALLS]"

    def read(self, body: str) -> list[FunctionCall]:
        calls = []
        for part in body.split(self.begin):
            named = _NAMED.match(part)
            if named is None:
                calls += [call_of(value) for value in read_json(part)]
            else:
                calls.append(FunctionCall(named[1], _compact(part[named.end() :])))
        return calls

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        calls = separated([call_tag(tool) for tool in tools], ", ", has_one)
        return {"type": "tag", "begin": f"{cls.begin}[", "content": calls, "end": "]"}


class MistralArgsParser(MistralParser):
    """The same, and a forced call is a name and arguments.

    Attributes:
        id_format: what stands between them; empty without ids.
    """

    id_format: ClassVar[list[Format]] = []

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        mark: Format = {"type": "const_string", "value": "[ARGS]"}
        tags: list[Format] = []
        for tool in tools:
            elements = [*cls.id_format, mark, schema_of(tool)]
            content: Format = {"type": "sequence", "elements": elements}
            begin = f"{cls.begin}{name_of(tool)}"
            tags.append({"type": "tag", "begin": begin, "content": content, "end": ""})
        return separated(tags, "", has_one)


class MistralIdParser(MistralArgsParser):
    """The same, with ids."""

    id_format: ClassVar[list[Format]] = [
        {"type": "const_string", "value": "[CALL_ID]"},
        {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"},
    ]


def mistral_parser(template: str) -> type[MistralParser]:
    """The parser for the calls that a chat template writes."""
    if "[ARGS]" not in template:
        return MistralParser
    return MistralIdParser if "[CALL_ID]" in template else MistralArgsParser


def _compact(text: str) -> str:
    """The text of a JSON object as other parsers write it."""
    return write_json(read_json(text))
