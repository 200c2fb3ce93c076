"""Stores the figures of one part on disk as soon as each is known.

So the figures of a part that later fails or runs out of time are not lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OUT_OF_TIME = 75  # EX_TEMPFAIL of sysexits.h


class Figures:
    """The figures of one part.

    Args:
        path: the JSON file that is written. If it exists, it has the figures of an earlier run of
            the same part that ran out of time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_figures(path)

    def get(self, name: str) -> Any:
        """Returns a figure, also one of the earlier run; None if there is none."""
        return self._values.get(name)

    def put(self, name: str, value: Any) -> None:
        """Adds or replaces a figure, or a table of figures."""
        self._values[name] = value
        write_json(self._path, self._values)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, or leaves the old one unchanged."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file, or leaves the old one unchanged."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def read_figures(path: Path) -> dict[str, Any]:
    """Returns the figures in a file, or none if the file does not exist."""
    if not path.exists():
        return {}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
