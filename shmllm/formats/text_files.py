"""Reads the small text files of a model's directory.

This module must not know what they contain.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_text(path: Path) -> str:
    """Returns the UTF-8 text of a regular file. A pipe in its place would never end.

    Raises:
        OSError: there is no such file, it cannot be read, or it is no regular file.
        ValueError: it is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read()
