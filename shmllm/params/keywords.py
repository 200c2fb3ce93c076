"""Unknown keyword arguments get one error that names the nearest option that exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def reject_unknown_options(callee: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first name in `given` that is not in `known`.

    Args:
        callee: what the person called, for the message.
        given: keyword names as passed.
        known: keyword names that `callee` takes.

    Raises:
        TypeError: names the unknown option and the nearest known one.
    """
    choices = sorted(known)
    for name in given:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1, cutoff=0.0)
            hint = f"; the nearest option is {near[0]!r}" if near else ""
            raise TypeError(f"{callee}() got an unknown option {name!r}{hint}")
