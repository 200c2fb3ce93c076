"""Reads the values that models write as literals of a language, such as Python, and not as JSON.

This module must not know formats of calls.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from shmllm.frontend.replies.json_text import finite

_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False} | {
    "null": None
}
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_BLANKS = re.compile(r"\s*")
Part = TypeVar("Part")


class LiteralReader(ABC):
    """Reads a text from its beginning to its end. What does not fit raises ValueError.

    Attributes:
        text: the text.
        position: how much of it is read.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    @abstractmethod
    def string(self) -> str | None:
        """Read a string; None if none begins here."""

    @abstractmethod
    def key(self) -> str:
        """Read a key of an object."""

    def value(self) -> Any:
        """Read a value."""
        if self.takes("["):
            return self.listed("]", self.value)
        if self.takes("{"):
            return dict(self.listed("}", self._item))
        string = self.string()
        if string is not None:
            return string
        number = self.match(_NUMBER)
        if number is None:
            return _CONSTANTS[self.word(_WORD)]
        return int(number) if number.lstrip("+-").isdecimal() else finite(number)

    def _item(self) -> tuple[str, Any]:
        key = self.key()
        self.expect(":")
        return key, self.value()

    def listed(self, end: str, part: Callable[[], Part]) -> list[Part]:
        """Read parts with commas between them, up to the end. A comma may follow the last one."""
        parts: list[Part] = []
        while not self.takes(end):
            if parts:
                self.expect(",")
                if self.takes(end):
                    break
            parts.append(part())
        return parts

    def word(self, pattern: re.Pattern[str]) -> str:
        """Read what must match a pattern."""
        found = self.match(pattern)
        if found is None:
            raise ValueError(f"nothing that can be read at character {self.position}")
        return found

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Read what matches a pattern behind blanks; None if nothing does."""
        self.skip_blanks()
        found = pattern.match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        return found[0]

    def expect(self, mark: str) -> None:
        """Read a mark that must stand here."""
        if not self.takes(mark):
            raise ValueError(f"no {mark} at character {self.position}")

    def takes(self, mark: str) -> bool:
        """Read a mark behind blanks if it stands here."""
        self.skip_blanks()
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def is_at_end(self) -> bool:
        self.skip_blanks()
        return self.position == len(self.text)

    def skip_blanks(self) -> None:
        found = _BLANKS.match(self.text, self.position)
        assert found is not None
        self.position = found.end()
