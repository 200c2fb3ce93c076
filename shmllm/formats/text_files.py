"""Reads the small text files of a model's directory.

This module must not know what they contain.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError


def open_regular(path: Path) -> int:
    """Opens a regular file to read it, and returns the descriptor. A pipe in its place would never
    begin, or never end.

    Raises:
        OSError: there is no such file, it cannot be read, or it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_text(path: Path) -> str:
    """Returns the UTF-8 text of a regular file.

    Raises:
        OSError: as `open_regular`.
        ValueError: it is not UTF-8.
    """
    with open(open_regular(path), encoding="utf-8") as file:
        return file.read()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object. A file that does not exist is an empty object.

    Raises:
        EngineStartError: the file cannot be read, or contains no JSON object.
    """
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise EngineStartError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise EngineStartError(
            f"cannot read {path}: expected a JSON object, found {type(content).__name__}"
        )
    return content


def one_line(cause: object) -> str:
    """The text of an exception or message with each run of whitespace replaced by one space."""
    text = " ".join(str(cause).split())
    return text or type(cause).__name__
