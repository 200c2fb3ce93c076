"""Counts how much of some memory each program of the kernels reads, in Triton's interpreter."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


@contextlib.contextmanager
def elements_read(memory: Tensor) -> Iterator[Counter[str]]:
    """Count the elements that programs read from a tensor in this context. The count of a kernel is
    that of the program that reads most."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    most: Counter[str] = Counter()
    by_program: Counter[Any] = Counter()
    load, launch = InterpreterBuilder.create_masked_load, GridExecutor.__call__

    def counting(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        is_read = mask.data & (ptrs.data >= begin) & (ptrs.data < end)
        by_program[builder.grid_idx] += int(np.count_nonzero(is_read))
        return load(builder, ptrs, mask, *rest)

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        by_program.clear()
        launch(executor, *args, **kwargs)
        name = executor.fn.__name__
        most[name] = max(most[name], *by_program.values(), 0)

    InterpreterBuilder.create_masked_load, GridExecutor.__call__ = counting, call
    try:
        yield most
    finally:
        InterpreterBuilder.create_masked_load, GridExecutor.__call__ = load, launch
