"""Makes Triton's interpreter several times as fast, without a change of any result.

The interpreter computes some things again and again whose outcome is known. It checks each integer
operation for an overflow, and then drops the check, because only its debug mode reports one. Each
launch, and each call of one kernel function by another, searches all of `triton.language` for the
functions that it replaces, and a launch puts them back. Each block gets objects of its own for its
shape and its type, equal types are compared number by number, and each look-up of a numpy dtype
builds the whole table of dtypes. Each operation of two operands finds out again which types they
have to have, and makes a block of each number in it. A launch copies all storages of its arguments
to the host and back, where they are already, and reads the signature of its kernel twice.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from functools import cache
from types import NoneType
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

core = language.core
np_dtypes: dict[str, Any] = {}
"""The numpy dtypes by the name of Triton's scalar type."""
block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
"""The attributes of block types by the name of the element's type and the shape."""
operands: dict[tuple[Any, ...], tuple[Any, Any, bool]] = {}
"""By the types of two blocks or scalars and the checks: their elements' types in the operation, or
None if they stay, and whether their shapes are equal."""
numbers: dict[tuple[Any, ...], tuple[Any, Any]] = {}
"""By a type, a number and the checks: the element's type in the operation, or None if it stays, and
the number as a block or scalar. Nothing writes to the memory of an operand."""
broadcasts: dict[tuple[Any, Any], list[Any]] = {}
"""By the types of two operands: the types that they have with one shape, or None if they stay."""
scalars: dict[tuple[type, Any], Any] = {}
"""The scalars of numbers that a kernel assigns to variables."""
MOST_NUMBERS = 20_000
modules: set[str] = set()
"""The modules of kernels, for which the functions of `triton.language` are replaced."""

find_np_dtype = interpreter._get_np_dtype
replace_functions = interpreter._patch_lang
init_block_type = core.block_type.__init__
are_dtypes_equal = core.dtype.__eq__
unwrap = core._unwrap_if_constexpr
Semantic = language.semantic.TritonSemantic
broadcast = Semantic.broadcast_impl_value
check_operands = Semantic.binary_op_type_checking_impl
make_tensor = Semantic.to_tensor
expand_dims = Semantic.expand_dims
cast = Semantic.cast
getitem = core.tensor.__getitem__
Handle = interpreter.TensorHandle
new_object = object.__new__

CHECK_OF_SEMANTIC = core.program_id.__code__
"""The code around each function of `triton.language`, which checks that it has a semantic."""
UNWRAPPED = {
    *(NoneType, bool, int, float, str),
    *(core.dtype, core.pointer_type, core.block_type, core.tensor),
}
NUMBERS = frozenset((bool, int, float))
PLAIN = {"fp32", "fp64", *[f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)]}
PLAIN_SOURCES = {*PLAIN, "int1"}
"""Types that the interpreter converts to one of `PLAIN` as numpy does."""
HALVES = {("fp16", "fp32"), ("fp32", "fp16")}
WHOLE = slice(None)
SEQUENCES = (tuple, list)
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
        type.of_tensor = sizes, core.constexpr(math.prod(type.shape.values)), key
        type.others, type.expanded = {}, {}
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
    """The attributes `shape`, `numel` and `key` come from the type."""
    tensor.handle, tensor.type = handle, type
    if type.__class__ is core.block_type:
        tensor.dtype = type.element_ty
        tensor.shape, tensor.numel, tensor.key = type.of_tensor
    else:
        tensor.dtype, tensor.key = type, type.name
        tensor.shape, tensor.numel = SHAPE_OF_SCALAR


def _init_handle(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    handle.data, handle.dtype = data, dtype
    handle.attr = {} if attr is None else attr
    if not _holds(data, dtype):
        handle.__post_init__()  # raises the error


def _holds(data: Any, dtype: Any) -> bool:
    """Whether an element of a numpy array is not larger than one of Triton's type."""
    if dtype.__class__ is core.pointer_type:
        return True
    size = data.itemsize
    return bool(size == 1 or size * 8 <= dtype.primitive_bitwidth)


def _handle(data: Any, dtype: Any) -> Any:
    """Return a handle of an array whose elements are not larger than those of Triton's type."""
    handle = new_object(Handle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return handle


def _binary_op(_builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
    if not _holds(output, dtype):
        output = output.astype(_get_np_dtype(dtype))
    return _handle(output, dtype)


def _check_operands(
    semantic: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Return the operands of an operation, cast and broadcast. What is done depends on the types
    and the numbers alone."""
    checks = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    is_left, is_right = lhs.__class__ is core.tensor, rhs.__class__ is core.tensor
    if is_left and is_right:
        key = lhs.key, rhs.key, *checks
        found = operands.get(key)
        if found is None:
            left, right = check_operands(semantic, lhs, rhs, *checks)
            operands[key] = (
                None if left.dtype == lhs.dtype else left.dtype,
                None if right.dtype == rhs.dtype else right.dtype,
                _have_equal_shapes(lhs.type, rhs.type),
            )
            return left, right
        left_type, right_type, is_same = found
        lhs = lhs if left_type is None else semantic.cast(lhs, left_type)
        rhs = rhs if right_type is None else semantic.cast(rhs, right_type)
        if is_same:
            return lhs, rhs
        return _broadcast(semantic, lhs, rhs)
    number, tensor = (rhs, lhs) if is_left else (lhs, rhs)
    if not (is_left or is_right) or number.__class__ not in NUMBERS:
        first, second = check_operands(semantic, lhs, rhs, *checks)
        return first, second
    place = tensor.key, number.__class__, number, is_left, *checks
    known = numbers.get(place)
    if known is None:
        left, right = check_operands(semantic, lhs, rhs, *checks)
        ours, other = (left, right) if is_left else (right, left)
        if len(numbers) < MOST_NUMBERS:
            numbers[place] = None if ours.dtype == tensor.dtype else ours.dtype, other
        return left, right
    kind, other = known
    tensor = tensor if kind is None else semantic.cast(tensor, kind)
    return (tensor, other) if is_left else (other, tensor)


def _to_tensor(semantic: Any, x: Any, check_type: bool = True) -> Any:
    kind = x.__class__
    if kind is core.tensor:
        return x
    if kind not in NUMBERS:
        return make_tensor(semantic, x, check_type)
    if (kind, x) not in scalars:
        if len(scalars) >= MOST_NUMBERS:
            return make_tensor(semantic, x, check_type)
        scalars[kind, x] = make_tensor(semantic, x, check_type)
    return scalars[kind, x]


def _unwrap_if_constexpr(value: Any) -> Any:
    kind = value.__class__
    if kind in UNWRAPPED:
        return value
    return value.value if kind is core.constexpr else unwrap(value)


def _have_equal_shapes(one: Any, other: Any) -> bool:
    """Whether both are scalars or blocks of one shape."""
    if one.is_block() and other.is_block():
        return bool(one.shape.values == other.shape.values)
    return not (one.is_block() or other.is_block())


def _broadcast(semantic: Any, one: Any, other: Any) -> tuple[Any, Any]:
    """Return both with the same shape. The types that this gives them depend on theirs alone."""
    key = one.key, other.key
    if key not in broadcasts:
        first, second = broadcast(semantic, one, other)
        pairs = (one.type, first.type), (other.type, second.type)
        broadcasts[key] = [None if after == before else after for before, after in pairs]
        return first, second
    first, second = broadcasts[key]
    return (
        one if first is None else _expand(one, first),
        other if second is None else _expand(other, second),
    )


def _expand(tensor: Any, kind: Any) -> Any:
    handle, shape = tensor.handle, kind.shape.values
    if tensor.type.is_block():
        data = _broadcast_to(handle.data, shape)
    else:
        data = np.full(shape, handle.data, dtype=_get_np_dtype(handle.dtype))
    return core.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), kind)


def _broadcast_to(data: Any, shape: Any) -> Any:
    """Return a view of an array with another shape. `np.broadcast_to` takes longer, and is needed
    where elements do not lie one behind the other and for further dimensions."""
    if not data.flags.c_contiguous or data.ndim != len(shape):
        return np.broadcast_to(data, shape)
    sizes = zip(data.shape, data.strides, strict=True)
    strides = tuple([0 if size == 1 else stride for size, stride in sizes])
    return np.ndarray(shape, data.dtype, data, 0, strides)


def _expand_dims(semantic: Any, tensor: Any, axis: int) -> Any:
    kind = tensor.type
    if kind.__class__ is not core.block_type:
        return expand_dims(semantic, tensor, axis)
    if axis not in kind.expanded:
        kind.expanded[axis] = expand_dims(semantic, tensor, axis).type
    handle = tensor.handle
    shape = handle.data.shape
    data = handle.data.reshape((*shape[:axis], 1, *shape[axis:]))
    return core.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), kind.expanded[axis])


def _getitem(tensor: Any, slices: Any, _semantic: Any = None) -> Any:
    """Insert dimensions, as `x[:, None]` does."""
    places = slices.values if slices.__class__ is core.tuple else slices
    if places.__class__ not in SEQUENCES:
        return getitem(tensor, slices, _semantic=_semantic)
    found = tensor
    for axis, place in enumerate(places):
        if place is None:
            found = _expand_dims(_semantic, found, axis)
        elif place.__class__ is not slice or place != WHOLE:
            return getitem(tensor, slices, _semantic=_semantic)
    return found


def _cast(semantic: Any, tensor: Any, dtype: Any, rounding: Any = None) -> Any:
    """Convert a block or scalar. Most types' conversion is numpy's."""
    kind, to = tensor.type, dtype.scalar
    source = kind.scalar
    if source is to:
        return tensor
    is_plain = source.name in PLAIN_SOURCES and to.name in PLAIN
    if rounding is not None or not (is_plain or (source.name, to.name) in HALVES):
        return cast(semantic, tensor, dtype, rounding)
    if source.name == to.name:
        return tensor
    handle = _handle(tensor.handle.data.astype(_get_np_dtype(to)), to)
    return core.tensor(handle, kind.with_element_ty(to) if kind.is_block() else to)


def _with_element_ty(type: Any, scalar_ty: Any) -> Any:
    name = scalar_ty.name
    key = name if scalar_ty.__class__ is core.dtype else (name, scalar_ty.address_space)
    if key not in type.others:
        type.others[key] = core.block_type(scalar_ty, type.shape)
    return type.others[key]


def _get_np_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in np_dtypes:
        np_dtypes[name] = find_np_dtype(dtype)
    return np_dtypes[name]


signature_of = cache(inspect.signature)


class _Inspect:
    """The module `inspect`, which keeps the signatures of kernels."""

    getfullargspec = staticmethod(cache(inspect.getfullargspec))

    @staticmethod
    def getcallargs(function: Any, *args: Any, **options: Any) -> dict[str, Any]:
        bound = signature_of(function).bind(*args, **options)
        bound.apply_defaults()
        return bound.arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


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
    interpreter.inspect = _Inspect()
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
    core.block_type.with_element_ty = _with_element_ty
    core.block_type.__eq__ = _are_block_types_equal
    Semantic.broadcast_impl_value = _broadcast
    Semantic.binary_op_type_checking_impl = _check_operands
    Semantic.to_tensor = _to_tensor
    Semantic.expand_dims = _expand_dims
    Semantic.cast = _cast
    core.tensor.__getitem__ = core.builtin(_getitem)
    interpreter.TensorHandle.__init__ = _init_handle
    interpreter.InterpreterBuilder.binary_op = _binary_op
