"""Reads content that a model writes between marks, such as <|START_RESPONSE|>: the marks at its
beginning and at its end are no part of it, nor are the blanks beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.frontend.replies.marks import num_begun
from shmllm.frontend.replies.parser import ReplyParser
from shmllm.outputs.reply import Reply


class FrameParser(ReplyParser):
    """
    Args:
        marks: the marks, none of which begins like another one.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._rest = ""
        self._has_mark = self._is_inside = False

    def feed(self, text: str) -> Reply:
        self._rest += text
        if not self._is_inside:
            self._open()
        if not self._is_inside:
            return Reply()
        num_begun_of_mark = max(num_begun(self._rest, mark) for mark in self._marks)
        certain = self._without_end(self._rest[: len(self._rest) - num_begun_of_mark])
        self._rest = self._rest[len(certain) :]
        return Reply(content=certain)

    def finish(self) -> Reply:
        rest, self._rest = self._rest, ""
        certain = self._without_end(rest)
        # Blanks that no mark follows belong to the content.
        return Reply(content=certain if rest[len(certain) :].strip() else rest)

    def _open(self) -> None:
        """Drop marks at the beginning, and find out whether the content begins behind them."""
        begun = self._rest.lstrip()
        while mark := next((mark for mark in self._marks if begun.startswith(mark)), ""):
            begun = begun.removeprefix(mark).lstrip()
            self._has_mark = True
        if self._has_mark:
            self._rest = begun
        self._is_inside = not any(mark.startswith(begun) for mark in self._marks)

    def _without_end(self, text: str) -> str:
        """The text without the blanks and marks at its end."""
        text = text.rstrip()
        while mark := next((mark for mark in self._marks if text.endswith(mark)), ""):
            text = text.removesuffix(mark).rstrip()
        return text
