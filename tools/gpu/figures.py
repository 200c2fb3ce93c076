"""The figures of one part, on disk from the moment each is known.

So what a part measured before it failed, or ran out of its time, is not lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Figures:
    """
    Args:
        path: of the JSON file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Add or replace a figure, or a table of them."""
        self._values[name] = value
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._values), encoding="utf-8")
        os.replace(beside, self._path)


def read_figures(path: Path) -> dict[str, Any]:
    """What `Figures` left there; nothing if it came to nothing."""
    if not path.exists():
        return {}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
