"""The TypeError for an unknown keyword argument, which names the most similar known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def reject_unknown_options(callee: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first name in `given` that is not in `known`.

    Args:
        callee: the name of the class or function that the user called, for the message.
        given: the names of the keyword arguments that the user passed.
        known: the names of the keyword arguments that `callee` accepts.

    Raises:
        TypeError: `given` contains an unknown name. The message contains that name and the
            most similar known one.
    """
    choices = sorted(known)
    for name in given:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1, cutoff=0.0)
            hint = f"; the nearest option is {near[0]!r}" if near else ""
            raise TypeError(f"{callee}() got an unknown option {name!r}{hint}")
