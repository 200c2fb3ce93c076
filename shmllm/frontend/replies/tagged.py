"""Tool calls whose arguments are texts between tags, and no JSON: the base of such formats.

The schema of the tool says whether the text of a parameter is a string or JSON. The templates write
booleans and null as Python does or as JSON has them, and so do the models.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from shmllm.errors import RequestError
from shmllm.frontend.replies.arguments import OF_OBJECTS, checked, refuse_but
from shmllm.frontend.replies.json_text import read_json, write_json
from shmllm.frontend.replies.parser import (
    Format,
    ToolParser,
    Tools,
    function_of,
    name_of,
    separated,
)
from shmllm.outputs.reply import FunctionCall

_PYTHON = {"True": True, "False": False, "None": None}


class TaggedParser(ToolParser):
    """
    Attributes:
        function: matches a call between its marks: its name and its parameters.
        parameter: matches a parameter: its name and its value.
        opens, closes: what is around the parameters of a forced call, with its name.
        key_opens, key_closes: what is around the value of each, with the parameter's name.
        between: what is between two calls.
        are_together: whether all forced calls are between one pair of marks, which have lines of
            their own.
    """

    begin = "<tool_call>"
    end = "</tool_call>"
    function: ClassVar[re.Pattern[str]]
    parameter: ClassVar[re.Pattern[str]]
    opens: ClassVar[str]
    closes: ClassVar[str]
    key_opens: ClassVar[str]
    key_closes: ClassVar[str]
    between: ClassVar[str] = "\n"
    are_together: ClassVar[bool] = False

    def read(self, body: str) -> list[FunctionCall]:
        calls: list[FunctionCall] = []
        while body or not calls:
            function = self.function.match(body)
            if function is None:
                raise ValueError("no call")
            calls.append(self._call(function[1].strip(), function[2].strip()))
            body = body[function.end() :]
        return calls

    def _call(self, name: str, rest: str) -> FunctionCall:
        tool = next((tool for tool in self._tools if name_of(tool) == name), None)
        properties = {} if tool is None else _properties(tool)
        arguments = {}
        while rest:
            found = self.parameter.match(rest)
            if found is None:
                raise ValueError("no parameter")
            key, value = self._argument(found, properties)
            arguments[key] = value
            rest = rest[found.end() :]
        return FunctionCall(name, write_json(arguments))

    def _argument(self, found: re.Match[str], properties: Mapping[str, Any]) -> tuple[str, Any]:
        """The name and the value of a parameter, which the tool's schema may describe."""
        key = found[1].strip()
        return key, value_of(found[2], properties.get(key))

    @classmethod
    def forced(cls, tools: Tools, has_one: bool) -> Format:
        tags = [
            {
                "type": "tag",
                "begin": cls.opens.format(name_of(tool)),
                "content": cls._parameters(tool),
                "end": cls.closes,
            }
            for tool in tools
        ]
        calls = separated(tags, cls.between, has_one)
        if not cls.are_together:
            return calls
        begin, end = f"{cls.begin}\n", f"\n{cls.end}"
        return {"type": "tag", "begin": begin, "content": calls, "end": end}

    @classmethod
    def _parameters(cls, tool: Mapping[str, Any]) -> Format:
        """The parameters of a tool in their order, of which those that are not required may miss.

        Raises:
            RequestError: they are malformed, or have what is not enforced.
        """
        return checked(tool, lambda schema: cls._sequence(tool, schema))

    @classmethod
    def _sequence(cls, tool: Mapping[str, Any], schema: Mapping[str, Any]) -> Format:
        refuse_but(OF_OBJECTS, schema)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        elements: list[Format] = []
        for key, given in _properties(tool).items():
            own = {} if given is True else given
            content: Format = {"type": "json_schema", "json_schema": {**own, **shared}}
            is_string = _is_string(own)
            if is_string:
                content = _plain_string(tool, key, own)
            tag: Format = {
                "type": "tag",
                "begin": cls._opens_key(key, is_string),
                "content": content,
                "end": cls.key_closes,
            }
            is_required = key in schema.get("required", ())
            elements.append(tag if is_required else {"type": "optional", "content": tag})
        none: Format = {"type": "const_string", "value": ""}
        return {"type": "sequence", "elements": elements or [none]}

    @classmethod
    def _opens_key(cls, key: str, is_string: bool) -> str:
        """What is before the value of a parameter."""
        return cls.key_opens.format(key)


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (function_of(tool).get("parameters") or {}).get("properties", {})
    return found


def _is_string(schema: Any) -> bool:
    """Whether a parameter is written without quotes."""
    return _types(schema) == {"string"}


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    if "enum" in schema:
        return set().union(*map(_types_of, schema["enum"]))
    if "type" in schema:
        named = schema["type"]
        return {named} if isinstance(named, str) else set(named)
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    found = [_types(choice) for choice in choices]
    return set().union(*found) if all(found) else set()


def _types_of(value: Any) -> set[str]:
    """The JSON types that a value has."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def value_of(text: str, schema: Any) -> Any:
    """The value that a text stands for. It is the text itself if that is all that can be."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else read_json(text)
    except (ValueError, RecursionError):
        return _python_value(text) if types & {"array", "object"} else text
    is_wrong = "string" in types and not types & _types_of(value)
    return text if is_wrong else value


def _python_value(text: str) -> Any:
    """The list or the dict that a text writes as Python does, as Seed-OSS's template has them; the
    text itself if it is none, or holds what JSON does not have."""
    try:
        value = ast.literal_eval(text)
        copied = read_json(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return copied if isinstance(value, list | dict) else text


def _plain_string(tool: Mapping[str, Any], key: str, schema: Mapping[str, Any]) -> Format:
    """The format of a parameter that is written without quotes.

    Raises:
        RequestError: its schema has what text without quotes is not checked for.
    """
    if "enum" in schema:
        choices = [{"type": "const_string", "value": str(each)} for each in schema["enum"]]
        return {"type": "or", "elements": choices}
    for keyword in ("pattern", "format", "minLength", "const"):
        if keyword in schema:
            raise RequestError(
                f"tool_choice: the parameter {key!r} of {name_of(tool)!r} has {keyword!r}, which "
                "the model's format of calls cannot enforce; remove it, or use tool_choice='auto'"
            )
    return {"type": "any_text", "max_chars": schema.get("maxLength")}
