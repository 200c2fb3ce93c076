"""Makes Triton's interpreter twice as fast, without a change of any result.

The interpreter does two things again and again whose outcome is known. It checks each integer
operation for an overflow, and then drops the check, because only its debug mode reports one. And
each launch, and each call of one kernel function by another, searches all of `triton.language` for
the functions that it replaces.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from triton import language
from triton.runtime import interpreter


@cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    """The names in a module or class of `triton.language` that the interpreter replaces."""
    members = interpreter.inspect.getmembers(package)
    return tuple(name for name, member in members if language.core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
    for name in _builtin_names(package):
        member = getattr(package, name)
        if language.core.is_builtin(member):  # and not replaced already
            interpreter._patch_attr(package, name, member, builder, *scope)


def install() -> None:
    """Change the interpreter of this process. Before the first launch: the names are looked up
    while nothing is replaced."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    core = language.core
    for package in (language, core, language.math, core.tensor, core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin = _patch_builtin
