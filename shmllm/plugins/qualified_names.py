"""Names of objects as "module:name", by which one process tells another what to import.

A class that no other process can import has a name of another kind, which contains the class: see
`name_of`.
"""

from __future__ import annotations

import pickle
import sys
from base64 import b64decode, b64encode
from importlib import import_module
from typing import Any

from shmllm.errors import EngineStartError

MAIN = "__main__"
PICKLED = "pickle:"
"""How the name of a class begins that contains the class itself."""


def name_of(cls: type, *, own_process: bool) -> str:
    """Return "module:name" of a class, by which another process can import it.

    If none can, because the class is the program's own or is defined inside a function, the name
    is "pickle:name@DATA" with the class itself, pickled by cloudpickle.

    Args:
        cls: the class.
        own_process: whether this process itself will import it.

    Raises:
        EngineStartError: there is no such name, and the class cannot be pickled.
    """
    module, name = cls.__module__, cls.__qualname__
    found: Any = sys.modules.get(module) if own_process or module != MAIN else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is cls else _pickled(cls)


def _pickled(cls: type) -> str:
    import cloudpickle  # type: ignore[import-untyped]  # takes 60 ms, and few programs need it

    try:
        data = b64encode(cloudpickle.dumps(cls)).decode()
    except Exception as problem:
        raise EngineStartError(
            f"{cls.__qualname__} is defined in the program itself or inside a function, and "
            f"cannot be pickled for an engine: {in_one_line(problem)}; put it into a module of "
            "its own, or pass multiprocess=False"
        ) from problem
    return f"{PICKLED}{cls.__qualname__}@{data}"


def shown(name: str) -> str:
    """Return a name as messages have it: "__main__:name" for a pickled class."""
    if not name.startswith(PICKLED):
        return name
    return f"{MAIN}:{name.removeprefix(PICKLED).partition('@')[0]}"


def load_object(name: str) -> Any:
    """Import the object that "module:name" names; "module.name" means the same. A class in its own
    name is made of it.

    Raises:
        EngineStartError: there is no such object, or the module cannot be imported. The message
            is one line.
    """
    if name.startswith(PICKLED):
        return _unpickled(name)
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


def _unpickled(name: str) -> Any:
    try:
        return pickle.loads(b64decode(name.rpartition("@")[2]))
    except Exception as problem:
        raise EngineStartError(
            f"{shown(name)}, a class of the program itself, cannot be loaded in an engine: "
            f"{in_one_line(problem)}"
        ) from problem


def in_one_line(problem: BaseException, most: int = 500) -> str:
    """Return the type and the text of an exception, as one line of at most `most` characters."""
    text = " ".join(f"{type(problem).__name__}: {problem}".split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
