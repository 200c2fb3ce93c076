"""Tool calls of DeepSeek V3, R1 and V3.1, between marks of the tokenizer.

A call of V3 and R1 is `function<sep>NAME`, a line end and the arguments as a block of JSON; one of
V3.1 is `NAME<sep>` and the arguments.
"""

from __future__ import annotations

import re
from typing import ClassVar

from shmllm.frontend.replies.json_text import read_json, write_json
from shmllm.frontend.replies.parser import Format, ToolParser, Tools, name_of, separated, tag_of
from shmllm.outputs.reply import FunctionCall

_FENCE = re.compile(r"```json\s*(.*?)\s*```\s*", re.DOTALL)


class SectionParser(ToolParser):
    """Calls in a section: names, separators and arguments as JSON.

    Attributes:
        call, close: what is around each call.
        separator: what is between its name and its arguments.
    """

    call: ClassVar[str]
    close: ClassVar[str]
    separator: ClassVar[str]

    def read(self, body: str) -> list[FunctionCall]:
        calls = [self._call(part) for part in body.split(self.call)[1:]]
        if not calls:
            raise ValueError("no call")
        return calls

    def _call(self, text: str) -> FunctionCall:
        head, separator, rest = text.partition(self.separator)
        if not separator:
            raise ValueError("no name")
        name, arguments = self._split(head, rest.partition(self.close)[0])
        return FunctionCall(name, write_json(read_json(arguments)))

    def _split(self, head: str, rest: str) -> tuple[str, str]:
        """The name and the arguments of the text before and behind the separator."""
        return head.strip(), rest

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [
            tag_of(f"{cls.call}{name_of(tool)}{cls.separator}", tool, cls.close) for tool in tools
        ]
        calls = separated(tags, "", has_one)
        return {"type": "tag", "begin": cls.begin, "content": calls, "end": cls.end}


class DeepSeekV31Parser(SectionParser):
    begin = "<\uff5ctool▁calls▁begin\uff5c>"
    end = "<\uff5ctool▁calls▁end\uff5c>"
    call = "<\uff5ctool▁call▁begin\uff5c>"
    close = "<\uff5ctool▁call▁end\uff5c>"
    separator = "<\uff5ctool▁sep\uff5c>"


class DeepSeekV3Parser(DeepSeekV31Parser):
    def _split(self, head: str, rest: str) -> tuple[str, str]:
        name, _, block = rest.partition("\n")
        fenced = _FENCE.fullmatch(block)
        return name.strip(), fenced[1] if fenced else block

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [
            tag_of(
                f"{cls.call}function{cls.separator}{name_of(tool)}\n```json\n",
                tool,
                f"\n```{cls.close}",
            )
            for tool in tools
        ]
        calls = separated(tags, "\n", has_one)
        return {"type": "tag", "begin": cls.begin, "content": calls, "end": cls.end}
