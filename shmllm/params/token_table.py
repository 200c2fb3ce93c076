"""TokenTable: token ids in rows of equal length."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

PADDING = -1
"""What stands in a row for no token."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """
    Attributes:
        width: the number of ids of a row, at least 1.
        ids: the ids of all rows, one row behind the other, int32; PADDING stands for none.
    """

    width: int
    ids: array[int]

    @classmethod
    def of(cls, value: Any) -> TokenTable | None:
        """The table of a numpy array, a torch tensor or nested lists; None if it is no table of
        token ids."""
        rows = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(rows, list | tuple) or not rows:
            return None
        if not all(isinstance(row, list | tuple) and len(row) == len(rows[0]) for row in rows):
            return None
        flat = [token for row in rows for token in row]
        if not all(type(token) is int and PADDING <= token < 2**31 for token in flat):
            return None
        return cls(len(rows[0]), array("i", flat)) if flat else None

    def __len__(self) -> int:
        return len(self.ids) // self.width

    def rows(self, begin: int, end: int) -> TokenTable:
        """Some of the rows."""
        return TokenTable(self.width, self.ids[begin * self.width : end * self.width])
