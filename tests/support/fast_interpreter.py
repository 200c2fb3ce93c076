"""Makes Triton's interpreter more than twice as fast, without a change of any result.

The interpreter computes some things again and again whose outcome is known. It checks each integer
operation for an overflow, and then drops the check, because only its debug mode reports one. Each
launch, and each call of one kernel function by another, searches all of `triton.language` for the
functions that it replaces. Each tensor gets objects of its own for the numbers of its shape, and
each look-up of a numpy dtype builds the whole table of dtypes.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

from triton import language
from triton.runtime import interpreter

core = language.core
find_np_dtype = interpreter._get_np_dtype
np_dtypes: dict[str, Any] = {}
"""The numpy dtypes by the name of Triton's scalar type."""


@cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    """The names in a module or class of `triton.language` that the interpreter replaces."""
    members = interpreter.inspect.getmembers(package)
    return tuple(name for name, member in members if core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
    names = _builtin_names(package)
    if core.is_builtin(getattr(package, names[0])):  # else all are replaced already
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, *scope)


@cache
def _shape_and_size(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The attributes `shape` and `numel` of a tensor."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = _shape_and_size(type.shape if type.is_block() else ())


def _get_np_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in np_dtypes:
        np_dtypes[name] = find_np_dtype(dtype)
    return np_dtypes[name]


def install() -> None:
    """Change the interpreter of this process. Before the first launch: the names are looked up
    while nothing is replaced."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    for package in (language, core, language.math, core.tensor, core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype
    core.tensor.__init__ = _init_tensor
