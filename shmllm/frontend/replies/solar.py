"""Tool calls and reasoning of Solar Open, whose replies are several messages:

<|think|>...<|end|><|begin|>assistant<|content|>...<|end|>
<|think|>...<|end|><|begin|>assistant<|tool_calls|>
<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{...}<|tool_call:end|><|calls|>
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.frontend.replies.deepseek import SectionParser
from shmllm.frontend.replies.parser import (
    Format,
    ReasoningParser,
    Tools,
    name_of,
    schema_of,
    separated,
)
from shmllm.outputs.reply import FunctionCall

_NEXT = "<|begin|>assistant"
_NAME = "<|tool_call:name|>"
_FRAME = (_NEXT, "<|content|>", "<|end|>")


class SolarReasoning(ReasoningParser):
    begin = "<|think|>"
    end = "<|end|>"
    frame = _FRAME

    @classmethod
    def lead(cls, is_open: bool) -> list[Format]:
        inside: Format = {"type": "any_text"}
        ends = f"{cls.end}{_NEXT}"
        if is_open:
            return [inside, {"type": "const_string", "value": ends}]
        tag: Format = {"type": "tag", "begin": cls.begin, "content": inside, "end": ends}
        return [{"type": "optional", "content": tag}]


class SolarParser(SectionParser):
    begin = "<|tool_calls|>"
    end = "<|calls|>"
    frame = _FRAME
    call = "<|tool_call:begin|>"
    close = "<|tool_call:end|>"
    separator = "<|tool_call:args|>"

    def _split(self, head: str, rest: str) -> tuple[str, str]:
        return head.rpartition(_NAME)[2].strip(), rest

    def ids(self, body: str, calls: Sequence[FunctionCall]) -> list[str]:
        """The ids that the model wrote; new ones where it did not."""
        written = [part.rpartition(_NAME)[0].strip() for part in body.split(self.call)[1:]]
        new = super().ids(body, calls)
        return [given or other for given, other in zip(written, new, strict=True)]

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags: list[Format] = []
        for tool in tools:
            head = f"{_NAME}{name_of(tool)}{cls.separator}"
            elements: list[Format] = [
                {"type": "regex", "pattern": "[a-z0-9]{10}"},
                {"type": "const_string", "value": head},
                schema_of(tool),
            ]
            content: Format = {"type": "sequence", "elements": elements}
            tags.append({"type": "tag", "begin": cls.call, "content": content, "end": cls.close})
        calls = separated(tags, "", has_one)
        return {"type": "tag", "begin": cls.begin, "content": calls, "end": cls.end}
