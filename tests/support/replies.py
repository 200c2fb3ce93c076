"""Tools, and what parsers find in replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmllm.frontend.replies.parser import ReplyParser
from shmllm.outputs.reply import Reply

Parts = tuple[str, str, list[tuple[str, str]]]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
OSLO = '{"city": "Oslo", "days": 2}'


def parts(reply: Reply) -> Parts:
    """The reasoning, the content, and the names and arguments of the calls."""
    calls = [(call.function.name, call.function.arguments) for call in reply.tool_calls]
    assert [call.index for call in reply.tool_calls] == list(range(len(calls)))
    return reply.reasoning, reply.content, calls


def parsed_in_pieces(parser: ReplyParser, pieces: Iterable[str]) -> Parts:
    """The parts of a reply that arrives in pieces."""
    reply = Reply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    return parts(reply)
