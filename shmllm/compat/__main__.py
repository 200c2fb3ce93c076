"""Runs a module in which `import vllm` finds shmllm: `python -m shmllm.compat MODULE [ARGS]`.

Without arguments, it prints what `import vllm` finds and what it does not find.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from shmllm.compat import vllm
from shmllm.compat.vllm_modules import ABSENT, MODULES, UNUSABLE, VERSION, names_of
from shmllm.errors import ShmLLMError

WIDTH = 80
INDENT = " " * 6
INTRODUCTION = f"""\
usage: python -m shmllm.compat MODULE [ARGUMENTS...]

Runs a Python module in which `import vllm` finds shmllm, which stands in for
the offline API of vLLM {VERSION.partition("+")[0]}. docs/vllm.md lists differences and options.
"""


def describe() -> str:
    """The modules and names that exist, and the nearest things to those that do not."""
    parts = (
        ("Exists:", [(module, ", ".join(names)) for module, names in _existing()]),
        ("Can be imported, but its use raises:", list(UNUSABLE.items())),
        ("Does not exist; the nearest thing is:", list(ABSENT.items())),
    )
    lines = [INTRODUCTION]
    for title, rows in parts:
        lines += [title, *(_row(name, text) for name, text in rows), ""]
    return "\n".join(lines)


def _existing() -> Iterator[tuple[str, list[str]]]:
    for module in MODULES:
        names = [name for name in names_of(module) if name not in UNUSABLE]
        if names:
            yield module, names


def _row(name: str, text: str) -> str:
    below = textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return f"  {name}\n{below}"


def main() -> None:
    """Installs the `vllm` modules and runs the module that the arguments name."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        _print(describe())
        return
    try:
        vllm.install()
    except ShmLLMError as error:
        _refuse(str(error))
    del sys.argv[0]
    _check_module(sys.argv[0])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _check_module(name: str) -> None:
    """Ends the process with one line if there is no such module."""
    if name.endswith(".py") and os.path.isfile(name):
        _refuse(f"{name} is a file; name its module: python -m shmllm.compat {Path(name).stem}")
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):
            raise  # a package's own import failed
        found = None
    if found is None:
        _refuse(f"there is no module {name!r} here, nor in sys.path")


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
