"""Which texts of a model's JSON files may name a file in the same directory."""

from __future__ import annotations

import os
from pathlib import Path

_LONGEST_FILE_NAME = 255


def is_file_name(value: object) -> bool:
    """Whether a value can be the name of a file in the same directory."""
    if not isinstance(value, str) or not value.isprintable() or Path(value).name != value:
        return False
    return value != ".." and 0 < len(os.fsencode(value)) <= _LONGEST_FILE_NAME
