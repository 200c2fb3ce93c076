"""The TypeError for an unknown keyword argument, which names what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shmllm.errors import RequestError, nearest
from shmllm.params.replaced_names import REPLACED_NAMES

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermarking": ((None, False), "texts have no watermarks"),
    "skip_clone": ((None, False, True), "parameters are copied when a request needs a copy"),
}
"""Parameters of vLLM's requests that change nothing here: the possible values, and why there are
no others."""


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


def without_neutral(callee: str, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments without those of vLLM that change nothing here.

    Args:
        callee, known: as for `reject_unknown_options`.
        given: the arguments.

    Raises:
        RequestError: one of them would change something.
        TypeError: as `reject_unknown_options`.
    """
    for name, (values, reason) in NEUTRAL.items():
        if given.get(name) not in values:
            raise RequestError(f"{name} can only be {' or '.join(map(repr, values))}: {reason}")
    left = {name: value for name, value in given.items() if name not in NEUTRAL}
    reject_unknown_options(callee, left, known)
    return left


def of_mapping(kind: Any, given: Mapping[str, Any]) -> Any:
    """Makes an object of the dataclass `kind`, whose fields are those of a mapping.

    Raises:
        TypeError: the mapping has a name that is no field; see `reject_unknown_options`.
    """
    reject_unknown_options(kind.__name__, map(str, given), kind.__dataclass_fields__)
    return kind(**given)
