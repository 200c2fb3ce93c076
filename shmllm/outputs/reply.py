"""The parts of a model's reply: reasoning, content and tool calls, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """
    Attributes:
        name: the name of the function.
        arguments: its arguments as the text of a JSON object. A model may write something else.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: what the message with the result repeats: nine letters and digits, or what the model
            wrote, such as "functions.f:0" of Kimi K2.
        function: what is called.
        type: always "function".
        index: the position of the call in its reply, from 0.
    """

    id: str
    function: FunctionCall
    type: str = "function"
    index: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a message."""
        found = asdict(self)
        del found["index"]
        return found


@dataclass(slots=True)
class Reply:
    """A reply, or what came to it.

    Attributes:
        reasoning: what the model writes before its answer.
        content: the answer.
        tool_calls: the calls. A stream has each of them once, when it is complete.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, other: Reply) -> None:
        """Append what came to the reply."""
        self.reasoning += other.reasoning
        self.content += other.content
        self.tool_calls += other.tool_calls
