"""Finds the variants of kernels that a GPU would compile, from launches in Triton's interpreter.

Triton compiles another variant of a kernel for each combination of its arguments' types, of
pointers and integers that are divisible by 16, of integers that are 1, and of its constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Variant = tuple[Any, ...]


@contextlib.contextmanager
def seen_variants(is_capturing: Callable[[], bool]) -> Iterator[dict[Variant, bool]]:
    """Collect the variants of the launches in this context. The value of a variant is true if its
    first launch was captured in a graph: a GPU cannot load code during a capture."""
    found: dict[Variant, bool] = {}
    original = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.setdefault(variant(kernel, args, options), is_capturing())
        return original(kernel, *args, grid=grid, warmup=warmup, **options)

    InterpretedFunction.run = run
    try:
        yield found
    finally:
        InterpretedFunction.run = original


def variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    unspecialised = kernel.kwargs.get("do_not_specialize") or ()
    given = zip(kernel.arg_names, args, strict=False)
    keys = [(name, _key(value, name not in unspecialised)) for name, value in given]
    return kernel.__name__, *keys, *sorted(options.items())


def _key(value: Any, is_specialised: bool) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        width = 32 if -(2**31) <= value < 2**31 else 64
        if not is_specialised:
            return width
        return "one" if value == 1 else (width, value % 16 == 0)
    return type(value)
