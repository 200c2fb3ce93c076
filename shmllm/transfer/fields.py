"""Reads mappings that programs send as dataclasses, with clear errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from shmllm.errors import RequestError, nearest

T = TypeVar("T")


def read(kind: type[T], given: object, what: str) -> T:
    """Make an object of a dataclass from a mapping of its fields.

    Args:
        kind: the dataclass.
        given: the mapping.
        what: its name, for messages.

    Raises:
        RequestError: it is no mapping, a key is unknown, or a field is missing.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"{what} must be a dict, got {type(given).__name__}")
    known: dict[str, Any] = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"; the nearest is {near!r}" if near else "; it takes no keys"
            raise RequestError(f"{what} has no key {key!r}{hint}")
    missing = [
        name
        for name, each in known.items()
        if name not in given and each.default is MISSING and each.default_factory is MISSING
    ]
    if missing:
        raise RequestError(f"{what} lacks {', '.join(missing)}")
    return kind(**given)
