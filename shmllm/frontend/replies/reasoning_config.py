"""The option `reasoning_config`: what begins reasoning, and what ends it at its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shmllm.errors import EngineStartError

AUTO = "auto"
OPTION = "reasoning_config"
PARSER = "reasoning_parser"
_BEGIN, _END = "reasoning_start_str", "reasoning_end_str"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """
    Attributes:
        begin: what begins reasoning; empty: what the parser of reasoning says.
        end: what is forced when the budget is used, the mark that ends reasoning included; empty:
            that mark alone.
    """

    begin: str = ""
    end: str = ""

    @classmethod
    def make(cls, given: Any) -> Self:
        """The marks of the option; None stands for an empty dict.

        Raises:
            EngineStartError: it is no dict, or has an unknown key or a value that is no text.
        """
        table = {} if given is None else given
        if not isinstance(table, Mapping):
            raise EngineStartError(f"{OPTION} must be a dict, got {given!r}")
        for key, value in table.items():
            if key not in (PARSER, _BEGIN, _END):
                raise EngineStartError(
                    f"{OPTION} has {key!r}; known are {PARSER}, {_BEGIN} and {_END}"
                )
            if not isinstance(value, str):
                raise EngineStartError(f"{key} of {OPTION} must be a text, got {value!r}")
        return cls(table.get(_BEGIN, ""), table.get(_END, ""))


def name_and_marks(parser: str, given: Any) -> tuple[str, ReasoningMarks]:
    """The name of the parser of reasoning, and the marks.

    Args:
        parser: the option `reasoning_parser`.
        given: the option `reasoning_config`, which may name it, too.

    Raises:
        EngineStartError: as `ReasoningMarks.make`, or both name one, and not the same.
    """
    marks = ReasoningMarks.make(given)
    own = str((given or {}).get(PARSER, ""))
    if own and parser not in (AUTO, own):
        raise EngineStartError(f"{PARSER} is {parser!r}, and {own!r} in {OPTION}: give it once")
    return own or parser, marks
