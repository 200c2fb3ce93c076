"""Names of objects as "module:name", by which one process tells another what to import."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from shmllm.errors import EngineStartError

MAIN = "__main__"


def name_of(cls: type, *, own_process: bool) -> str:
    """Return "module:name" of a class.

    Args:
        cls: the class.
        own_process: whether this process itself will import it.

    Raises:
        EngineStartError: no other process can import the class by a name.
    """
    module, name = cls.__module__, cls.__qualname__
    if "<locals>" in name:
        raise EngineStartError(
            f"{name} is defined inside a function, so an engine cannot import it; define it at the "
            "top of a module"
        )
    if module == MAIN and not own_process:
        raise EngineStartError(
            f"{name} is defined in the program itself ({MAIN}), which an engine process cannot "
            "import; put it into a module of its own, or pass multiprocess=False"
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        raise EngineStartError(f"{module}:{name} is not the name of {cls!r}, so none can import it")
    return f"{module}:{name}"


def load_object(name: str) -> Any:
    """Import the object that "module:name" names; "module.name" means the same.

    Raises:
        EngineStartError: there is no such object, or the module cannot be imported. The message
            is one line.
    """
    module, colon, path = name.partition(":")
    if not colon:
        module, _, path = name.rpartition(".")
    if not path or not all(part.isidentifier() for part in module.split(".")):
        raise EngineStartError(f"{name!r} does not name an object as 'module:name'")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as problem:
        told = in_one_line(problem)
        if isinstance(problem, ModuleNotFoundError) and f"{module}.".startswith(f"{problem.name}."):
            told += "; PYTHONPATH names the folders of modules, and PYTHONPATH=. this one"
        raise EngineStartError(f"{name} cannot be imported: {told}") from problem
    return found


def in_one_line(problem: BaseException, most: int = 500) -> str:
    """Return the type and the text of an exception, as one line of at most `most` characters."""
    text = " ".join(f"{type(problem).__name__}: {problem}".split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
