"""Compiled functions return the same results as Python for the same source."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm_kernels.cpu.language import Compiled, NotInLanguage, compiled, compiled_noinline
from shmllm_kernels.cpu.memory import floats, put_word, word
from shmllm_kernels.cpu.object_code import addresses_of

NUMBERS = st.integers(-(2**40), 2**40)


def call(function: Compiled, *arguments: int, constants: tuple[Any, ...] = ()) -> int:
    (address,) = addresses_of((function, constants))
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))
    return int(kind(address)(*arguments))


class Pair(NamedTuple):
    low: int
    high: int


@compiled
def _pair(a, b):
    return Pair(min(a, b), max(a, b))


@compiled
def _sign(a):
    if a < 0:
        return -1
    elif a == 0:
        return 0
    return 1


@compiled
def _divide(a, b):
    return a // b * 3 + a % b


@compiled
def _bits(a, b):
    return ((a & b) << 2) + ((a | b) >> 3)


@compiled
def _order(a, b):
    pair = _pair(a, b)
    low, high = pair
    return (
        (high - low) * 10 + _sign(pair.low) * _sign(b) + (1 if (a != b and a >= -b) or b > 7 else 0)
    )


@compiled
def _count(a, b):
    total, left = 0, a % 50
    while left > 0:
        for i in range(left, 0 if b < 0 else left + b % 5):
            total += i
        for i in range(0, left, 3):
            if i == 6:
                total -= 1
            else:
                total = total + i * b
        left -= 7
    a = total
    return a


@pytest.mark.parametrize("function", [_bits, _order, _count, _divide], ids=lambda f: f.tree.name)
@settings(max_examples=200, deadline=None)
@given(a=NUMBERS, b=NUMBERS | st.integers(-9, 9))
def test_integer_arithmetic_equals_pythons(function: Compiled, a: int, b: int) -> None:
    b = b or 1
    assert call(function, a, b) == function(a, b)


@compiled
def _guarded(address, limit):
    return 1 if address != 0 and word(address, 0) < limit else 0


def test_and_and_conditional_expressions_short_circuit() -> None:
    assert call(_guarded, 0, 5) == 0
    value = np.array([4])
    assert call(_guarded, value.ctypes.data, 5) == 1
    assert call(_guarded, value.ctypes.data, 4) == 0


@compiled
def _sums(numbers, count, out):
    values, total = floats(numbers), np.float32(0.0)
    for i in range(count):
        values[i] *= np.float32(0.1)
        total += np.sqrt(max(values[i], np.float32(0.0))) / np.float32(i + 1)
    floats(out)[0] = total


def test_float32_arithmetic_equals_numpys() -> None:
    numbers = np.random.default_rng(1).normal(size=100).astype(np.float32)
    scaled, total = numbers * np.float32(0.1), np.float32(0)
    for i, value in enumerate(scaled):
        total += np.sqrt(max(value, np.float32(0))) / np.float32(i + 1)
    out = np.zeros(1, np.float32)
    call(_sums, numbers.ctypes.data, len(numbers), out.ctypes.data)
    assert (numbers == scaled).all()
    assert out[0] == total


@compiled
def _compared(numbers):
    a, b = floats(numbers)[0], floats(numbers)[1]
    found = (1 if a < b else 0) + (2 if a == b else 0) + (4 if a != b else 0)
    return found + (8 if a >= b else 0)


@pytest.mark.parametrize("b", [1.0, 2.0, 3.0, math.nan])
def test_comparisons_with_nan_equal_pythons(b: float) -> None:
    a, numbers = 2.0, np.array([2.0, b], np.float32)
    expected = (a < b) + 2 * (a == b) + 4 * (a != b) + 8 * (a >= b)
    assert call(_compared, numbers.ctypes.data) == expected


@compiled
def _constants(out, kind, size):
    if kind == "one":
        put_word(out, 0, size)
    else:
        no_such_function(out)  # noqa: F821


def test_a_branch_on_a_constant_is_decided_during_translation() -> None:
    out = np.zeros(1, np.int64)
    assert call(_constants, out.ctypes.data, constants=("one", 7)) == 0
    assert out[0] == 7


@compiled_noinline
def _put_scaled(out, index, value, kind):
    put_word(out, index, value * (10 if kind == "tens" else 1))


@compiled
def _put_some(out, count):
    for i in range(count):
        _put_scaled(out, 2 * i, i, "tens")
        _put_scaled(out, 2 * i + 1, 7, "ones")


def test_a_noinline_function_is_compiled_for_each_constant_argument() -> None:
    out = np.zeros(6, np.int64)
    call(_put_some, out.ctypes.data, 3)
    assert out.tolist() == [0, 7, 10, 7, 20, 7]


@compiled
def _after_loop(n):
    for i in range(n):
        put_word(0, i, i)
    return i


@compiled
def _half(numbers):
    return 1 if floats(numbers)[0] * 0.5 > np.float32(1) else 0


@compiled
def _number_as_condition(n):
    return 1 if n else 0


@compiled
def _list(n):
    return [n][0]


@pytest.mark.parametrize(
    "function",
    [_after_loop, _half, _number_as_condition, _list, _constants],
    ids=lambda f: f.tree.name,
)
def test_unsupported_python_is_an_error(function: Compiled) -> None:
    constants = ("other", 1) if function is _constants else ()
    with pytest.raises((NotInLanguage, RuntimeError)):
        call(function, 1, constants=constants)


def test_an_error_names_the_source_line() -> None:
    with pytest.raises(NotInLanguage) as raised:
        call(_list, 1)
    line = _list.tree.lineno + 1
    assert raised.value.__notes__ == [f"in a kernel, {__file__}:{line}"]
