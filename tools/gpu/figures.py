"""Stores the figures of one part on disk as soon as each is known.

So the figures of a part that later fails or runs out of time are not lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Figures:
    """The figures of one part.

    Args:
        path: the JSON file that is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Adds or replaces a figure, or a table of figures."""
        self._values[name] = value
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps(self._values), encoding="utf-8")
        os.replace(unfinished, self._path)


def read_figures(path: Path) -> dict[str, Any]:
    """Returns the figures in a file, or none if the file does not exist."""
    if not path.exists():
        return {}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
