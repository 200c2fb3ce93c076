"""Formats of structural tags for the arguments of forced calls that are no JSON object.

A `Spelling` says how a format writes values. This module must not know how replies are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from shmllm.errors import RequestError
from shmllm.frontend.constraints.json_schema import WITHOUT_EFFECT
from shmllm.frontend.replies.parser import Format, function_of, name_of

_DEFINITIONS = frozenset({"$defs", "definitions"})
OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_ANY = ("string", "number", "boolean", "null")
"""The types of a value of which a schema says nothing."""


class Spelling(ABC):
    """How a format writes arguments.

    Attributes:
        assigns: what is between the name of an argument and its value.
        comma: what is between two arguments.
    """

    assigns: ClassVar[str]
    comma: ClassVar[str] = ","

    @abstractmethod
    def constant(self, value: Any) -> str:
        """The text of a value."""

    @abstractmethod
    def string(self, schema: Mapping[str, Any]) -> Format:
        """The format of a string. See `other` for errors."""

    @abstractmethod
    def other(self, schema: Mapping[str, Any]) -> Format:
        """The format of a list, an object, or what has further keywords.

        Raises:
            NotEnforcedError: the schema has what the format cannot enforce.
        """

    def arguments(self, tool: Mapping[str, Any]) -> Format:
        """The format of a tool's arguments, of which those that are not required may miss.

        Raises:
            RequestError: its parameters are malformed, or have what the format cannot enforce.
        """
        return checked(tool, self.fields)

    def fields(self, schema: Mapping[str, Any]) -> Format:
        """The format of the properties of an object, without its braces."""
        refuse_but(OF_OBJECTS, schema)
        shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
        required = schema.get("required", ())
        properties = dict(schema.get("properties", {}))
        properties |= {key: True for key in required if key not in properties}
        return listed(
            [
                (self._field(key, {} if given is True else {**given, **shared}), key in required)
                for key, given in self.in_order(properties).items()
            ],
            self.comma,
        )

    def in_order(self, properties: Mapping[str, Any]) -> Mapping[str, Any]:
        """The properties of an object in the order in which they are written."""
        return properties

    def _field(self, key: str, schema: Mapping[str, Any]) -> Format:
        return sequence(constant(key + self.assigns), self.value(schema))

    def value(self, schema: Mapping[str, Any]) -> Format:
        """The format of a value."""
        keywords = effective(schema)
        if keywords in ({"enum"}, {"enum", "type"}):
            return either([constant(self.constant(each)) for each in schema["enum"]])
        if keywords in ({"const"}, {"const", "type"}):
            return constant(self.constant(schema["const"]))
        if keywords == {"anyOf"}:
            shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
            return either([self.value({**each, **shared}) for each in schema["anyOf"]])
        if keywords and ("type" not in keywords or keywords & {"enum", "const", "anyOf"}):
            return self.other(schema)
        named = schema.get("type", _ANY)
        names = [named] if isinstance(named, str) else named
        return either([self._of_type(name, {**schema, "type": name}) for name in names])

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> Format:
        match name:
            case "string":
                return self.string(schema)
            case "boolean":
                return either([constant(self.constant(each)) for each in (True, False)])
            case "null":
                return constant(self.constant(None))
            case "integer" | "number":
                return {"type": "json_schema", "json_schema": schema}
        return self.other(schema)


class NotEnforcedError(Exception):
    """A schema has the keyword of the message, which a format cannot enforce."""


def effective(schema: Mapping[str, Any]) -> frozenset[str]:
    """The keywords of a schema that say something of a value."""
    return frozenset(schema) - WITHOUT_EFFECT - _DEFINITIONS


def refuse_but(enforced: frozenset[str], schema: Mapping[str, Any]) -> None:
    """Raises NotEnforcedError for a schema with further keywords."""
    for keyword in sorted(effective(schema) - enforced):
        raise NotEnforcedError(repr(keyword))


def checked(tool: Mapping[str, Any], translate: Callable[[Mapping[str, Any]], Format]) -> Format:
    """The format that a function makes of the schema of a tool's parameters.

    Raises:
        RequestError: they are malformed, or have what the format cannot enforce.
    """
    try:
        return translate(function_of(tool).get("parameters") or {})
    except (TypeError, AttributeError):
        raise RequestError(
            f"tool_choice: the parameters of {name_of(tool)!r} must be the JSON schema of an "
            "object, with a schema for each of its 'properties'"
        ) from None
    except NotEnforcedError as error:
        raise RequestError(
            f"tool_choice: the parameters of {name_of(tool)!r} have {error}, which the model's "
            "format of calls cannot enforce; remove it, or use tool_choice='auto'"
        ) from None


def listed(fields: Sequence[tuple[Format, bool]], comma: str) -> Format:
    """The format of fields with commas between them, in their order.

    Args:
        fields: the format of each, and whether it is required.
        comma: what is between two fields.
    """
    tail: list[Format] = []
    beginnings: list[Format] = []
    for field, is_required in reversed(fields):
        if is_required:
            beginnings = []
        beginnings.insert(0, sequence(field, *tail))
        following = sequence(constant(comma), field)
        tail.insert(0, following if is_required else optional(following))
    found = either(beginnings)
    return found if any(is_required for _, is_required in fields) else optional(found)


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": [*elements]}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def either(elements: list[Format]) -> Format:
    """One of several formats, or nothing if there are none."""
    if len(elements) == 1:
        return elements[0]
    return {"type": "or", "elements": elements} if elements else constant("")
