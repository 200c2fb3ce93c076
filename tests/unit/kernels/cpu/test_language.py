"""Compiled functions do what Python does with the same text."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm_kernels.cpu.language import Compiled, NotInLanguage, compiled, compiled_apart
from shmllm_kernels.cpu.memory import floats, put_word, word
from shmllm_kernels.cpu.objects import addresses_of

NUMBERS = st.integers(-(2**40), 2**40)


def call(function: Compiled, *arguments: int, known: tuple[Any, ...] = ()) -> int:
    (address,) = addresses_of((function, known))
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
def test_whole_numbers_are_pythons(function: Compiled, a: int, b: int) -> None:
    b = b or 1
    assert call(function, a, b) == function(a, b)


@compiled
def _guarded(address, limit):
    return 1 if address != 0 and word(address, 0) < limit else 0


def test_what_need_not_be_looked_at_is_not() -> None:
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


def test_float32_are_numpys() -> None:
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
def test_comparisons_know_what_is_no_number(b: float) -> None:
    a, numbers = 2.0, np.array([2.0, b], np.float32)
    expected = (a < b) + 2 * (a == b) + 4 * (a != b) + 8 * (a >= b)
    assert call(_compared, numbers.ctypes.data) == expected


@compiled
def _known(out, kind, size):
    if kind == "one":
        put_word(out, 0, size)
    else:
        no_such_function(out)  # noqa: F821


def test_what_is_known_is_decided_before() -> None:
    out = np.zeros(1, np.int64)
    assert call(_known, out.ctypes.data, known=("one", 7)) == 0
    assert out[0] == 7


@compiled_apart
def _put_scaled(out, index, value, kind):
    put_word(out, index, value * (10 if kind == "tens" else 1))


@compiled
def _put_some(out, count):
    for i in range(count):
        _put_scaled(out, 2 * i, i, "tens")
        _put_scaled(out, 2 * i + 1, 7, "ones")


def test_functions_apart_are_one_for_each_kind() -> None:
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
    "function", [_after_loop, _half, _number_as_condition, _list, _known], ids=lambda f: f.tree.name
)
def test_what_is_not_in_the_language_is_refused(function: Compiled) -> None:
    known = ("other", 1) if function is _known else ()
    with pytest.raises((NotInLanguage, RuntimeError)):
        call(function, 1, known=known)


def test_what_is_refused_is_pointed_at() -> None:
    with pytest.raises(NotInLanguage) as raised:
        call(_list, 1)
    line = _list.tree.lineno + 1
    assert raised.value.__notes__ == [f"in a kernel, {__file__}:{line}"]
