"""Names the classes of the option `logits_processors`, as an engine imports them by name."""

from __future__ import annotations

from typing import Any

from shmllm.plugins.qualified_names import name_of


def name_processors(given: Any, multiprocess: bool) -> Any:
    """Return the option with a name in place of each class. All else is returned unchanged, for the
    option to check.

    Args:
        given: the option: None, or classes and names.
        multiprocess: whether the engine is another process.

    Raises:
        EngineStartError: an engine could not import a class by its name.
    """
    if not isinstance(given, list | tuple):
        return given
    own_process = not multiprocess
    return [name_of(c, own_process=own_process) if isinstance(c, type) else c for c in given]
