"""Makes Triton's interpreter several times as fast, without a change of any result.

The interpreter computes some things again and again whose outcome is known. It checks each integer
operation for an overflow, and then drops the check, because only its debug mode reports one. Each
launch, and each call of one kernel function by another, searches all of `triton.language` for the
functions that it replaces, and a launch puts them back. Each block gets objects of its own for its
shape and its type, equal types are compared number by number, and each look-up of a numpy dtype
builds the whole table of dtypes. A launch copies all storages of its arguments to the host and
back, where they are already.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from types import NoneType
from typing import Any

from triton import language
from triton.runtime import interpreter

core = language.core
np_dtypes: dict[str, Any] = {}
"""The numpy dtypes by the name of Triton's scalar type."""
block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
"""The attributes of block types by the name of the element's type and the shape."""
modules: set[str] = set()
"""The modules of kernels, for which the functions of `triton.language` are replaced."""

find_np_dtype = interpreter._get_np_dtype
replace_functions = interpreter._patch_lang
init_block_type = core.block_type.__init__
are_dtypes_equal = core.dtype.__eq__
unwrap = core._unwrap_if_constexpr
broadcast = language.semantic.TritonSemantic.broadcast_impl_value

CHECK_OF_SEMANTIC = core.program_id.__code__
"""The code around each function of `triton.language`, which checks that it has a semantic."""
UNWRAPPED = {
    *(NoneType, bool, int, float, str),
    *(core.dtype, core.pointer_type, core.block_type, core.tensor),
}
SHAPE_OF_SCALAR = core.tuple([]), core.constexpr(1)


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


def _patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any = None) -> None:
    has_check = getattr(member, "__code__", None) is CHECK_OF_SEMANTIC
    function, semantic = (
        member.__wrapped__ if has_check else member,
        interpreter.interpreter_semantic,
    )

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    setattr(owner, name, call) if scope is None else scope.set_attr(owner, name, call)


def _patch_lang(function: Any) -> Any:
    """Replace the functions that a kernel's module sees, once and for ever."""
    if function.__module__ not in modules:
        modules.add(function.__module__)
        replace_functions(function)
    return interpreter._LangPatchScope()


def _init_block_type(type: Any, element_ty: Any, shape: Any) -> None:
    key = (
        element_ty.name,
        *[size.value if isinstance(size, core.constexpr) else size for size in shape],
    )
    if key not in block_types:
        init_block_type(type, element_ty, shape)
        sizes = core.tuple([core.constexpr(size) for size in type.shape])
        type.of_tensor = sizes, core.constexpr(math.prod(type.shape.values))
        block_types[key] = dict(vars(type))
    vars(type).update(block_types[key])
    type.element_ty = element_ty


def _are_block_types_equal(type: Any, other: Any) -> bool:
    if type is other:
        return True
    return (
        isinstance(other, core.block_type)
        and type.shape.values == other.shape.values
        and type.element_ty == other.element_ty
    )


def _are_dtypes_equal(type: Any, other: Any) -> bool:
    return type is other or are_dtypes_equal(type, other)


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """The attributes `shape` and `numel` come from the type."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = type.of_tensor if type.is_block() else SHAPE_OF_SCALAR


def _unwrap_if_constexpr(value: Any) -> Any:
    kind = value.__class__
    if kind in UNWRAPPED:
        return value
    return value.value if kind is core.constexpr else unwrap(value)


def _broadcast(semantic: Any, one: Any, other: Any) -> tuple[Any, Any]:
    if one.type.is_block():
        is_same = other.type.is_block() and one.type.shape.values == other.type.shape.values
    else:
        is_same = not other.type.is_block()
    return (one, other) if is_same else broadcast(semantic, one, other)


def _get_np_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in np_dtypes:
        np_dtypes[name] = find_np_dtype(dtype)
    return np_dtypes[name]


def _use_arguments(_executor: Any, args: Any, options: Any) -> Any:
    return args, options


def _keep_arguments(*_: Any) -> None:
    """Nothing was copied."""


def install() -> None:
    """Change the interpreter of this process. Before the first launch: the names are looked up
    while nothing is replaced."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    for package in (language, core, language.math, core.tensor, core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    interpreter.GridExecutor._init_args_hst = _use_arguments
    interpreter.GridExecutor._restore_args_dev = _keep_arguments
    core._unwrap_if_constexpr = _unwrap_if_constexpr
    core.tensor.__init__ = _init_tensor
    core.dtype.__eq__ = _are_dtypes_equal
    core.block_type.__init__ = _init_block_type
    core.block_type.__eq__ = _are_block_types_equal
    language.semantic.TritonSemantic.broadcast_impl_value = _broadcast
