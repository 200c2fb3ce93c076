"""The TypeError for an unknown keyword argument, which names what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shmllm.errors import nearest
from shmllm.params.replaced_names import REPLACED_NAMES


def reject_unknown_options(callee: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first name in `given` that is not in `known`.

    Args:
        callee: the name of the class or function that the user called, for the message.
        given: the names of the keyword arguments that the user passed.
        known: the names of the keyword arguments that `callee` accepts.

    Raises:
        TypeError: `given` contains an unknown name. The message contains that name, and what
            replaced it or the most similar known one.
    """
    choices = sorted(known)
    for name in given:
        if name not in choices:
            if instead := REPLACED_NAMES.get(name):
                hint = f"; {instead}"
            else:
                near = nearest(name, choices)
                hint = f"; the nearest option is {near!r}" if near else ""
            raise TypeError(f"{callee}() got an unknown option {name!r}{hint}")


def of_mapping(kind: Any, given: Mapping[str, Any]) -> Any:
    """Makes an object of the dataclass `kind`, whose fields are those of a mapping.

    Raises:
        TypeError: the mapping has a name that is no field; see `reject_unknown_options`.
    """
    reject_unknown_options(kind.__name__, map(str, given), kind.__dataclass_fields__)
    return kind(**given)
