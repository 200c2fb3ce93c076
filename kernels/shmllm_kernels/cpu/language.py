"""The language of CPU kernels: a subset of Python, translated to LLVM when a kernel is first used.

A `compiled` function may use int64 and float32 numbers, calls, assignments, ``if``, ``for`` over
ranges, ``while`` and ``return``. Its calls are inlined. Expressions of constants (Python numbers,
dtype names, named tuples) are computed during translation, so an ``if`` on a constant costs
nothing. An `emitted` function emits LLVM instructions itself.

This module owns the meaning of operators and built-in functions. It must not know the kernels, nor
where compiled code is stored.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.simd import FLOAT, INT32, INT64, function

BOOL = ir.IntType(1)


class Compiled:
    """A function in this language. Python can call it as an ordinary function.

    Args:
        source: the Python function.
        fastmath: LLVM's names of the fast-math flags of its float operations.
        is_noinline: whether the machine code calls it as a function instead of inlining it.
    """

    def __init__(
        self, source: Callable[..., Any], fastmath: tuple[str, ...] = (), is_noinline: bool = False
    ) -> None:
        functools.update_wrapper(self, source)
        self.source, self.fastmath, self.is_noinline = source, fastmath, is_noinline

    def __call__(self, *args: Any) -> Any:
        return self.source(*args)

    @functools.cached_property
    def tree(self) -> ast.FunctionDef:
        lines, first = inspect.getsourcelines(self.source)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        definition = ast.increment_lineno(tree, first - 1).body[0]
        assert isinstance(definition, ast.FunctionDef)
        return definition

    @functools.cached_property
    def reassigned(self) -> set[str]:
        """The names that the function assigns in several places."""
        names = [argument.arg for argument in self.tree.args.args]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append(node.id)
        return {name for name, count in Counter(names).items() if count > 1}

    @functools.cached_property
    def outer_names(self) -> dict[str, Any]:
        """The built-in, global and nonlocal names that the function uses, with their values."""
        known = inspect.getclosurevars(self.source)
        return {**known.builtins, **known.globals, **known.nonlocals}


def compiled(source: Callable[..., Any]) -> Compiled:
    """Decorator of a function in this language."""
    return Compiled(source)


def compiled_noinline(source: Callable[..., Any]) -> Compiled:
    """Decorator of a function that is called instead of inlined.

    It takes int64 numbers and dtype names, and returns nothing. LLVM keeps more values of an inner
    loop in registers if the loop is in a function of its own.
    """
    return Compiled(source, is_noinline=True)


def compiled_with(*fastmath: str) -> Callable[[Callable[..., Any]], Compiled]:
    """Decorator of a function whose float operations have these fast-math flags of LLVM."""
    return lambda source: Compiled(source, fastmath)


class Emitted:
    """A function (builder, *arguments) -> value or None that emits LLVM instructions."""

    def __init__(self, emit: Callable[..., Any]) -> None:
        self.emit = emit
        self.__doc__ = emit.__doc__


def emitted(emit: Callable[..., Any]) -> Any:
    """Decorator of a function that emits LLVM instructions. Only compiled code can call it."""
    return Emitted(emit)


class View:
    """An array of numbers in memory, which compiled code reads and writes by index."""

    def __init__(self, builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> None:
        self._start = builder.inttoptr(address, kind.as_pointer())

    def at(self, builder: ir.IRBuilder, index: Any) -> ir.Value:
        return builder.gep(self._start, [as_value(index)])


class NotInLanguage(Exception):
    """A kernel uses a part of Python that this language does not support."""


def as_value(x: Any) -> ir.Value:
    """Converts a value to an operand of an instruction; a Python int becomes an int64."""
    if isinstance(x, ir.Value):
        return x
    if isinstance(x, bool):
        return ir.Constant(BOOL, x)
    if isinstance(x, int | np.integer):
        return ir.Constant(INT64, int(x))
    raise NotInLanguage(f"{x!r} is not a number here; write float32 numbers as np.float32(...)")


def as_same_type(a: Any, b: Any) -> tuple[ir.Value, ir.Value]:
    """Converts two values to operands of the same type."""
    if isinstance(a, int) and isinstance(b, ir.Value):
        return ir.Constant(b.type, a), b
    if isinstance(b, int) and isinstance(a, ir.Value):
        return a, ir.Constant(a.type, b)
    a, b = as_value(a), as_value(b)
    if a.type != b.type:
        raise NotInLanguage(f"operands have different types: {a.type} and {b.type}")
    return a, b


def is_constant(*values: Any) -> bool:
    """Whether all values are constants, known during translation."""
    return not any(isinstance(value, ir.Value | View) for value in values)


# For each operator: the Python function for constants, LLVM's instruction for int64, and LLVM's
# instruction for float32.
_OPERATIONS: dict[type[ast.operator], tuple[Callable[..., Any], str, str]] = {
    ast.Add: (operator.add, "add", "fadd"),
    ast.Sub: (operator.sub, "sub", "fsub"),
    ast.Mult: (operator.mul, "mul", "fmul"),
    ast.Div: (operator.truediv, "", "fdiv"),
    ast.FloorDiv: (operator.floordiv, "floor_div", ""),
    ast.Mod: (operator.mod, "modulo", ""),
    ast.BitAnd: (operator.and_, "and_", ""),
    ast.BitOr: (operator.or_, "or_", ""),
    ast.LShift: (operator.lshift, "shl", ""),
    ast.RShift: (operator.rshift, "ashr", ""),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[Callable[..., Any], str]] = {
    ast.Lt: (operator.lt, "<"),
    ast.LtE: (operator.le, "<="),
    ast.Gt: (operator.gt, ">"),
    ast.GtE: (operator.ge, ">="),
    ast.Eq: (operator.eq, "=="),
    ast.NotEq: (operator.ne, "!="),
}


def compare(builder: ir.IRBuilder, kind: type[ast.cmpop], a: Any, b: Any) -> Any:
    """Emits a comparison, or compares two constants."""
    python, sign = _COMPARISONS[kind]
    if is_constant(a, b):
        return python(a, b)
    a, b = as_same_type(a, b)
    if a.type != FLOAT:
        return builder.icmp_signed(sign, a, b)
    differs = sign == "!="  # true for a NaN; the other comparisons are false
    return (builder.fcmp_unordered if differs else builder.fcmp_ordered)(sign, a, b)


def operate(
    builder: ir.IRBuilder, kind: type[ast.operator], a: Any, b: Any, fastmath: tuple[str, ...]
) -> Any:
    """Emits an arithmetic operation, or computes it from two constants."""
    python, of_integers, of_floats = _OPERATIONS[kind]
    if is_constant(a, b):
        return python(a, b)
    a, b = as_same_type(a, b)
    name = of_floats if a.type == FLOAT else of_integers
    if not name:
        raise NotInLanguage(f"{kind.__name__} of {a.type}")
    if name in ("floor_div", "modulo"):
        return (_floor_div if name == "floor_div" else _modulo)(builder, a, b)
    if a.type == FLOAT:
        return getattr(builder, name)(a, b, flags=fastmath)
    return getattr(builder, name)(a, b)


def _has_wrong_sign(builder: ir.IRBuilder, rest: ir.Value, b: ir.Value) -> ir.Value:
    """Whether a nonzero remainder has another sign than its divisor, which Python rules out."""
    zero = ir.Constant(b.type, 0)
    differs = builder.icmp_signed("<", builder.xor(rest, b), zero)
    return builder.and_(differs, builder.icmp_signed("!=", rest, zero))


def _floor_div(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    beyond = _has_wrong_sign(builder, builder.srem(a, b), b)
    return builder.sub(builder.sdiv(a, b), builder.zext(beyond, b.type))


def _modulo(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    rest = builder.srem(a, b)
    zero = ir.Constant(b.type, 0)
    return builder.add(rest, builder.select(_has_wrong_sign(builder, rest, b), b, zero))


def negate(builder: ir.IRBuilder, value: Any) -> Any:
    """Emits a negation, or negates a constant."""
    if is_constant(value):
        return -value
    return builder.fneg(value) if value.type == FLOAT else builder.neg(value)


def _to_float(builder: ir.IRBuilder, x: Any) -> ir.Value:
    if is_constant(x):
        return ir.Constant(FLOAT, float(np.float32(x)))
    return x if x.type == FLOAT else builder.sitofp(x, FLOAT)


def _to_int32(builder: ir.IRBuilder, x: Any) -> ir.Value:
    if is_constant(x):
        return ir.Constant(INT32, int(x))
    return builder.fptosi(x, INT32) if x.type == FLOAT else builder.trunc(x, INT32)


def _to_int64(builder: ir.IRBuilder, x: Any) -> ir.Value:
    if is_constant(x):
        return ir.Constant(INT64, int(x))
    return x if x.type == INT64 else builder.sext(x, INT64)


def _of_llvm(name: str) -> Callable[[ir.IRBuilder, ir.Value], ir.Value]:
    def emit(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        return builder.call(function(builder, f"llvm.{name}.f32", FLOAT, [FLOAT]), [x])

    return emit


def _min(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    if is_constant(a, b):
        return min(a, b)
    a, b = as_same_type(a, b)
    return builder.select(compare(builder, ast.Lt, b, a), b, a)


def _max(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    if is_constant(a, b):
        return max(a, b)
    a, b = as_same_type(a, b)
    return builder.select(compare(builder, ast.Gt, b, a), b, a)


BUILT_IN: dict[Any, Callable[..., Any]] = {
    np.float32: _to_float,
    np.int32: _to_int32,
    np.int64: _to_int64,
    np.sqrt: _of_llvm("sqrt"),
    np.floor: _of_llvm("floor"),
    math.cos: _of_llvm("cos"),
    math.sin: _of_llvm("sin"),
    math.log: _of_llvm("log"),
    min: _min,
    max: _max,
}
"""Emitters for the functions of Python and numpy that compiled code may call."""
