"""Calls of methods by parts that must not keep the objects they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

P = ParamSpec("P")
T = TypeVar("T")


def weak_call(method: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls a bound method and does not keep its object.

    A part of an object that knows the object's methods makes a cycle, which would keep the memory
    of a closed engine until Python collects cycles.
    """
    found = WeakMethod(method)

    def call(*args: P.args, **options: P.kwargs) -> T:
        bound = found()
        assert bound is not None, "the object is there as long as its parts are used"
        return bound(*args, **options)

    return call
