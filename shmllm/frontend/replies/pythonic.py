"""Tool calls as Python's calls: lists of LFM2, Llama 4 and others, and lines of Olmo 3.

<|tool_call_start|>[f(city='Oslo', days=2), g()]<|tool_call_end|>

Models and their templates write strings with line ends and with quotes of the same kind, which
Python itself refuses, and constants as JSON has them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from shmllm.frontend.replies.arguments import Spelling, effective
from shmllm.frontend.replies.bare import BareParser
from shmllm.frontend.replies.json_text import read_json, write_json
from shmllm.frontend.replies.literals import LiteralReader
from shmllm.frontend.replies.parser import Format, ToolParser, Tools, call_of, name_of, separated
from shmllm.outputs.reply import FunctionCall

_NAME = re.compile(r"[^\W\d][\w.-]*")
_QUOTES = ("'''", '"""', "'", '"')
_CLOSED = re.compile(r"\s*(?:[,:)\]}]|\Z)")
"""What follows a quote that ends a string."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_ESCAPES |= {each: each for each in "\\'\"/"}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_PAIR = re.compile("([\ud800-\udbff])([\udc00-\udfff])")


class _CallReader(LiteralReader):
    def call(self) -> FunctionCall:
        """Read a call, whose arguments all have names."""
        name = self.word(_NAME)
        self.expect("(")
        return FunctionCall(name, write_json(dict(self.listed(")", self._argument))))

    def _argument(self) -> tuple[str, Any]:
        name = self.word(_NAME)
        self.expect("=")
        return name, self.value()

    def key(self) -> str:
        found = self.string()
        if found is None:
            raise ValueError("a key that is no string")
        return found

    def string(self) -> str | None:
        quote = next((each for each in _QUOTES if self.takes(each)), None)
        if quote is None:
            return None
        parts: list[str] = []
        while not self._ends(quote):
            character = self.text[self.position]
            self.position += 1
            parts.append(self._escaped() if character == "\\" else character)
        return _PAIR.sub(_joined, "".join(parts))

    def _ends(self, quote: str) -> bool:
        if self.position >= len(self.text):
            raise ValueError("a string without an end")
        end = self.position + len(quote)
        if not self.text.startswith(quote, self.position) or not _CLOSED.match(self.text, end):
            return False
        self.position = end
        return True

    def _escaped(self) -> str:
        """Read what follows a backslash; an unknown escape is the text itself, as in Python."""
        code = _CODE.match(self.text, self.position)
        if code is not None:
            self.position = code.end()
            return chr(min(int(code[1] or code[2] or code[3], 16), sys.maxunicode))
        character = self.text[self.position : self.position + 1]
        if character in _ESCAPES:
            self.position += 1
            return _ESCAPES[character]
        return "\\"


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


class _PythonSpelling(Spelling):
    assigns = "="
    comma = ", "

    def constant(self, value: Any) -> str:
        return repr(value)

    def string(self, schema: Mapping[str, Any]) -> Format:
        if effective(schema) != {"type"}:
            return self.other(schema)
        return {"type": "regex", "pattern": r"'(?:[^'\\\n]|\\[\\'n])*'"}

    def other(self, schema: Mapping[str, Any]) -> Format:
        return {"type": "json_schema", "json_schema": schema}


_SPELLING = _PythonSpelling()


class CallsParser(ToolParser):
    """
    Attributes:
        opens, between, closes: what is around and between forced calls, inside of the marks.
    """

    opens: ClassVar[str] = "["
    between: ClassVar[str] = ", "
    closes: ClassVar[str] = "]"

    def read(self, body: str) -> list[FunctionCall]:
        reader = _CallReader(body)
        reader.expect("[")
        calls = reader.listed("]", reader.call)
        if not calls or not reader.is_at_end():
            raise ValueError("no calls")
        return calls

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags: list[Format] = [
            {
                "type": "tag",
                "begin": f"{name_of(tool)}(",
                "content": _SPELLING.arguments(tool),
                "end": ")",
            }
            for tool in tools
        ]
        return {
            "type": "tag",
            "begin": cls.begin + cls.opens,
            "content": separated(tags, cls.between, has_one),
            "end": cls.closes + cls.end,
        }


class Lfm2Parser(CallsParser):
    begin = "<|tool_call_start|>"
    end = "<|tool_call_end|>"

    def read(self, body: str) -> list[FunctionCall]:
        if body.lstrip().startswith("[{"):  # a system message may ask for JSON
            return [call_of(value) for value in read_json(body)]
        return super().read(body)


class Olmo3Parser(CallsParser):
    """Calls without brackets, each on a line."""

    begin = "<function_calls>"
    end = "</function_calls>"
    opens = closes = between = "\n"

    def read(self, body: str) -> list[FunctionCall]:
        reader = _CallReader(body)
        calls = [reader.call()]
        while not reader.is_at_end():
            calls.append(reader.call())
        return calls


class Llama4Parser(BareParser, CallsParser):
    """Llama 4, whose marks may be missing."""

    begin = "<|python_start|>"
    end = "<|python_end|>"
    opening = "["


class PythonicParser(Llama4Parser):
    """Llama 3.2 and others with vLLM's pythonic templates: a reply that is a list of calls."""

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        return super().forced(tools, has_one) | {"begin": cls.opens, "end": cls.closes}
