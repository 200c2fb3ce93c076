"""Tool calls of GigaChat 3, a message of its own, and of 3.1, behind a mark. A reply has one.

Text<|message_sep|>

function call<|role_sep|>
{"name": "f", "arguments": {...}}<|message_sep|>
"""

from __future__ import annotations

from typing import ClassVar

from shmllm.frontend.replies.json_text import read_json
from shmllm.frontend.replies.parser import Format, ToolParser, Tools, call_of, call_tag
from shmllm.outputs.reply import FunctionCall


class GigaChat3Parser(ToolParser):
    """
    Attributes:
        lead: what ends the empty answer before a forced call.
    """

    lead: ClassVar[str] = "<|message_sep|>\n\n"
    begin = "function call<|role_sep|>\n"
    end = "<|message_sep|>"
    frame = ("<|message_sep|>",)

    def read(self, body: str) -> list[FunctionCall]:
        return [call_of(read_json(body))]

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [call_tag(tool, f"{cls.lead}{cls.begin}") for tool in tools]
        return {"type": "or", "elements": tags}


class GigaChat31Parser(GigaChat3Parser):
    lead = ""
    begin = "<|function_call|>"


def gigachat_parser(template: str) -> type[GigaChat3Parser]:
    """The parser for the calls that a chat template writes."""
    return GigaChat31Parser if GigaChat31Parser.begin in template else GigaChat3Parser
