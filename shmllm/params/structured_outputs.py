"""What a structured output has to match: the parameters only.

Names and meaning are those of vLLM's class. Knows nothing of grammars or how they are
compiled; what a field may hold beyond its type is checked where the grammar is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmllm.errors import RequestError

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True)
class StructuredOutputsParams:
    """Exactly one of the constraints, and how it is read.

    Args:
        json: a JSON schema as a dict or text, or a pydantic model class.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: a context-free grammar in EBNF.
        json_object: True for any JSON object.
        disable_any_whitespace: JSON without blanks outside strings.
        disable_additional_properties: objects hold no properties that the schema does not name.
        whitespace_pattern: regular expression of the blanks allowed in JSON; None: one, and
            a line break with an indentation of up to 40.
        structural_tag: a constraint for parts of the output, as JSON text.

    Raises:
        RequestError: no constraint, or more than one.
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
