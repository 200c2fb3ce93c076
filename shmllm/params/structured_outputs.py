"""The constraint of a structured output, and the defaults of an engine, with vLLM's names.

This module must not know how grammars are written or compiled:
`frontend.constraints.structured_outputs` checks the values and makes the grammar.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.unknown_options import reject_unknown_options

logger = logging.getLogger(__name__)

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True)
class StructuredOutputsParams:
    """A constraint that the whole output of a request must match.

    Exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag` must
    be given. docs/structured-outputs.md describes what each accepts.

    Args:
        json: a JSON schema: a dict, its JSON text, or a pydantic model class.
        regex: a regular expression in Python's syntax, which the whole output matches.
        choice: a non-empty list of strings, one of which is the output.
        grammar: a context-free grammar, as EBNF with a rule `root` or as Lark with a rule
            `start`.
        json_object: True, for any JSON object.
        disable_any_whitespace: for JSON: allow no whitespace outside strings.
        disable_additional_properties: for JSON schemas: objects contain only the properties
            that the schema lists.
        whitespace_pattern: for JSON: a regular expression for the whitespace that is allowed
            between two parts. None allows at most one space or tab, and at most one line break
            with an indentation of up to 40 characters.
        structural_tag: free text with parts that are constrained, as a dict or its JSON text.

    Raises:
        RequestError: none of the constraints is given, or more than one.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}; got {found}"
            )


@dataclass(frozen=True, slots=True)
class StructuredOutputsDefaults:
    """The value of the option `structured_outputs_config`.

    Attributes:
        disable_any_whitespace: as in StructuredOutputsParams, for all JSON without a
            `whitespace_pattern`.
        disable_additional_properties: as in StructuredOutputsParams, for all JSON.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    @classmethod
    def make(cls, value: Any) -> StructuredOutputsDefaults:
        """The defaults for a value of the option: None, a dict, or an object with attributes.

        vLLM's other settings have no effect; a backend other than llguidance, or a parser of
        reasoning, causes a warning in the log.

        Raises:
            TypeError: an unknown setting, or a value of another type.
        """
        found = {} if value is None else getattr(value, "__dict__", value)
        if not isinstance(found, Mapping):
            raise TypeError(f"structured_outputs_config is a dict, got {value!r}")
        reject_unknown_options(
            "structured_outputs_config", found, (*cls.__dataclass_fields__, *_WITHOUT_EFFECT)
        )
        for name, (same, reason) in _WITHOUT_EFFECT.items():
            if found.get(name, same[0]) not in same:
                logger.warning(
                    "structured_outputs_config: %s=%r has no effect: %s", name, found[name], reason
                )
        own = {name: found[name] for name in cls.__dataclass_fields__ if name in found}
        for name, flag in own.items():
            if not isinstance(flag, bool):
                raise TypeError(f"structured_outputs_config: {name} is True or False, got {flag!r}")
        return cls(**own)

    def complete(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """The parameters of a request with these defaults; the same object if there are none."""
        if params.json is None and params.json_object is None:
            return params
        compact = self.disable_any_whitespace and params.whitespace_pattern is None
        closed = self.disable_additional_properties
        if not (compact or closed):
            return params
        return replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or compact,
            disable_additional_properties=params.disable_additional_properties or closed,
        )


_ALWAYS = "the backend is always llguidance"
_ELSEWHERE = "give the option reasoning_parser of LLM"
_WITHOUT_EFFECT = {
    "backend": (("auto", "guidance"), _ALWAYS),
    "disable_fallback": ((False, True), _ALWAYS),
    "reasoning_parser": (("", None), _ELSEWHERE),
    "reasoning_parser_plugin": (("", None), "there are no plugins"),
    "enable_in_reasoning": ((False, True), "a structured output holds for the whole output"),
}
"""vLLM's other settings by name: the values that describe what happens anyway, and why others have
no effect."""
