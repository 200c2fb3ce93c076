"""Shows a chat: answers on stdout, and remarks about them on stderr.

This module must not know what a conversation is.
"""

from __future__ import annotations

import os
from typing import TextIO

_CARETS = {code: f"^{chr(code ^ 0x40)}" for code in (*range(0x20), 0x7F) if chr(code) not in "\n\t"}
_VISIBLE = _CARETS | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def visible(text: str) -> str:
    """The text with each control character as something to see, except line ends and tabs.

    A model may write escape sequences, which would move the cursor, or change the colours, the
    title and the modes of a terminal.
    """
    return text.translate(_VISIBLE)


class Screen:
    """
    Args:
        out: where answers go. What goes to a terminal contains no control characters.
        notes: where remarks go, dimmed if it is a terminal.
    """

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._notes = notes
        self._is_terminal = out.isatty()
        self._dims = notes.isatty() and not os.environ.get("NO_COLOR") and _has_styles()
        self._is_line_open = False
        self._is_reasoning = False

    def write(self, text: str, is_reasoning: bool = False) -> None:
        """Write a piece of an answer, or of the reasoning before it, which is a remark."""
        if not text:
            return
        if is_reasoning != self._is_reasoning:
            self.end_line()
            self._is_reasoning = is_reasoning
        self._is_line_open = not text.endswith("\n")
        if is_reasoning:
            self._write_note(text, end="")
            return
        self._out.write(visible(text) if self._is_terminal else text)
        self._out.flush()

    def end_line(self) -> None:
        """Begin a new line, unless the last piece ended with one."""
        if self._is_line_open:
            self.write("\n", self._is_reasoning)
        self._is_reasoning = False

    def note(self, text: str) -> None:
        """Write a line about the chat."""
        self._write_note(text)

    def complain(self, text: str) -> None:
        """Write a line about something that failed."""
        self._notes.write(f"shmllm: {visible(' '.join(text.split()))}\n")
        self._notes.flush()

    def _write_note(self, text: str, end: str = "\n") -> None:
        text = visible(text)
        self._notes.write((f"{_DIM}{text}{_PLAIN}" if self._dims else text) + end)
        self._notes.flush()


def _has_styles() -> bool:
    return os.environ.get("TERM", "dumb") not in ("", "dumb")
