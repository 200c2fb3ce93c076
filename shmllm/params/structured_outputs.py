"""StructuredOutputsParams: the constraint of a structured output, with vLLM's names and meaning.

This module must not know how grammars are written or compiled:
`frontend.constraints.structured_outputs` checks the values and makes the grammar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmllm.errors import RequestError

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
        structural_tag: not supported; a request with this field is refused.

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
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}; got {found}"
            )
