"""The commands of a chat, and what a line means: a message or a command.

This module must not know what a command does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shmllm.errors import RequestError, nearest

MARK = "/"


class Command(Enum):
    """A command: its name, the name of its argument, and what it does."""

    SYSTEM = ("system", "TEXT", "set the system message; without TEXT: remove it")
    RESET = ("reset", "", "forget all messages but the system message")
    REGENERATE = ("regenerate", "", "answer the last message again")
    IMAGE = ("image", "[FILE]", "attach an image to the next message; alone: list what is attached")
    AUDIO = ("audio", "[FILE]", "the same with a sound")
    VIDEO = ("video", "[FILE]", "the same with a video")
    DETACH = ("detach", "", "drop what is attached")
    RESULT = ("result", "TEXT", "give the result of the tool call that waits for one")
    SAVE = ("save", "FILE", "write the messages to a new file, for --messages or a batch")
    REPLACE = ("save!", "FILE", "the same, and replace a file that exists")
    HELP = ("help", "", "show this list")
    EXIT = ("exit", "", "end the chat, as Ctrl-D does")

    def __init__(self, word: str, argument: str, meaning: str) -> None:
        self.word = word
        self.argument = argument
        self.meaning = meaning


SYNONYMS = {"": Command.HELP, "?": Command.HELP, "quit": Command.EXIT, "bye": Command.EXIT}
"""What people type who know other chats."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was read.

    Attributes:
        command: the command; None for a message.
        text: the message, or the command's argument.
    """

    command: Command | None
    text: str


def parse(text: str) -> Line:
    """What a line means. Two slashes at the beginning stand for one in a message.

    Raises:
        RequestError: the command is unknown, or its argument is missing or too much.
    """
    stripped = text.strip()
    if not stripped.startswith(MARK):
        return Line(None, text)
    if stripped.startswith(2 * MARK):
        return Line(None, stripped.removeprefix(MARK))
    word, _, rest = stripped.removeprefix(MARK).partition(" ")
    argument = rest.strip()
    by_word = {command.word: command for command in Command}
    if word not in by_word | SYNONYMS:
        guess = nearest(word, by_word)
        raise RequestError(
            f"unknown command {MARK}{word[:40]}; did you mean {MARK}{guess}? {MARK}help lists all, "
            f"and {2 * MARK} begins a message with {MARK}"
        )
    command = (by_word | SYNONYMS)[word]
    if argument and not command.argument:
        raise RequestError(f"{MARK}{word} takes nothing after it")
    if command.argument == "FILE" and not argument:
        raise RequestError(f"{MARK}{word} needs the name of a file")
    return Line(command, argument)


def help_lines() -> list[str]:
    """The commands and keys, one a line."""
    uses = {f"{MARK}{each.word} {each.argument}".strip(): each.meaning for each in Command}
    uses |= {
        "Alt-Enter": "a new line in the message; a paste keeps its lines",
        "Ctrl-C": "end the answer; what was written of it stays in the conversation",
        "Ctrl-D": "end the chat",
    }
    width = max(map(len, uses))
    return [f"{use.ljust(width)}  {meaning}" for use, meaning in uses.items()]
