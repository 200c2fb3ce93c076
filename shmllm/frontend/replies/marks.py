"""Finds marks such as "<think>" in a text that arrives in pieces, and the blanks around them."""

from __future__ import annotations

from collections.abc import Sequence


def cut_at_mark(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Cut a text at the first of some marks.

    Returns:
        The text before the mark, the mark and the text behind it. Without a mark, the second is
        empty, and the third may become the beginning of one.
    """
    found = [(text.index(mark), mark) for mark in marks if mark in text]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    num_held = max((num_begun(text, mark) for mark in marks), default=0)
    return text[: len(text) - num_held], "", text[len(text) - num_held :]


def num_begun(text: str, mark: str) -> int:
    """How many characters at the end of the text are the beginning of a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


class Section:
    """A text in a reply, without the blanks between it and the marks around it.

    Args:
        is_open: whether blanks at its beginning belong to it.
    """

    def __init__(self, is_open: bool = True) -> None:
        self._is_open = is_open
        self._blanks = ""

    def add(self, text: str) -> str:
        """Add a piece. Returns what is certain to belong to the section."""
        text = self._blanks + text
        if not self._is_open:
            text = text.lstrip()
        certain = text.rstrip()
        self._blanks = text[len(certain) :]
        self._is_open = self._is_open or bool(certain)
        return certain

    def cut(self) -> None:
        """A mark stands here: drop the blanks before it, and those that follow."""
        self._blanks = ""
        self._is_open = False

    def end(self) -> str:
        """The text ends here. Returns the blanks at its end."""
        blanks, self._blanks = self._blanks, ""
        return blanks
