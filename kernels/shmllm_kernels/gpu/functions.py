"""Functions of floating-point numbers that several kernels use, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)): 0 where the exponential is infinite."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)) to a relative error of 2**-21, also where the exponential is far
    below one. A GPU's logarithm has an absolute error of 2**-22 there: this is the series of
    2 artanh(e / (2 + e)), and the first term left out is less than 2e-8 of the sum."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    sums = 1.0 / 11.0 + z * (1.0 / 13.0)
    sums = 1.0 / 7.0 + z * (1.0 / 9.0 + z * sums)
    sums = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * sums))
    return tl.maximum(x, 0.0) + 2.0 * s * sums


@triton.jit
def exp_remainder(x):
    """Returns exp(x) - 1 - x for x at most 0, to a relative error of 2**-20. Above -0.5 it is the
    Taylor polynomial of degree 9, whose first term left out is 3e-8 of it."""
    y = 1.0 + x * (1.0 / 8.0) * (1.0 + x * (1.0 / 9.0))
    y = 1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0) * y)
    y = 1.0 + x * (1.0 / 4.0) * (1.0 + x * (1.0 / 5.0) * y)
    y = 1.0 + x * (1.0 / 3.0) * y
    return tl.where(x > -0.5, 0.5 * x * x * y, tl.exp(x) - 1.0 - x)


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent, to an absolute error of 2**-23: 1 where the exponential is
    infinite."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
