"""Names the classes that options hold, as an engine finds them by these names."""

from __future__ import annotations

from typing import Any

from shmllm.plugins.qualified_names import name_of


def name_class(given: Any, multiprocess: bool) -> Any:
    """Return the name of a class, or anything else unchanged, for the option to check.

    Args:
        given: a class or a name.
        multiprocess: whether other processes than this one import the class.

    Raises:
        EngineStartError: an engine could neither import nor unpickle the class.
    """
    return name_of(given, own_process=not multiprocess) if isinstance(given, type) else given


def name_processors(given: Any, multiprocess: bool) -> Any:
    """Do what `name_class` does, for each item of the option `logits_processors`."""
    if not isinstance(given, list | tuple):
        return given
    return [name_class(each, multiprocess) for each in given]
