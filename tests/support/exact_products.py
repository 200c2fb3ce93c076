"""Lets Triton's interpreter multiply blocks in float64, and round each sum once.

In float32 numpy's BLAS adds in an order that depends on the processor and on where a row lies in
its block. So two kernels that a GPU gives the same bits for a row would differ by a rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
of_other_types = interpreter.InterpreterBuilder.create_dot


def _create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    kinds = a.data.dtype.kind, b.data.dtype.kind, d.data.dtype.kind
    if set(kinds) != {"f"}:  # 8 bits, and bfloat16, have the type of integers
        return of_other_types(self, a, b, d, *precision)
    product = np.matmul(a.data, b.data, dtype=np.float64)
    return Handle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def install() -> None:
    """Replace the interpreter's product of blocks, for the lifetime of the process."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
