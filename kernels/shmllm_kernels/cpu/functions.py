"""Elementary functions of float32, for compiled code.

They consist of arithmetic that LLVM can vectorise, without calls of the C library. A result
depends on the arguments alone, not on the loop that surrounds the function.
"""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.language import compiled_with
from shmllm_kernels.cpu.memory import float_of_bits


@compiled_with("contract")
def exp(x):
    """Returns e**x for x at most 88, to 2 units in the last place; 0 below -87.

    It computes 2**n * e**r with an integer n and |r| <= ln(2) / 2, and e**r by its Taylor
    polynomial of degree 7. LLVM can vectorise this arithmetic, but not a call of expf.
    """
    bounded = max(x, np.float32(-87.0))
    n = np.floor(bounded * np.float32(1.4426950408889634) + np.float32(0.5))
    r = bounded - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1 / 5040)
    y = y * r + np.float32(1 / 720)
    y = y * r + np.float32(1 / 120)
    y = y * r + np.float32(1 / 24)
    y = y * r + np.float32(1 / 6)
    y = y * r + np.float32(0.5)
    y = y * r + np.float32(1.0)
    y = y * r + np.float32(1.0)
    scaled = y * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return scaled if x >= np.float32(-87.0) else np.float32(0.0)


@compiled_with("contract")
def exp_remainder(x):
    """Returns e**x - 1 - x for x at most 0, to a relative error of 1e-6.

    Above -0.5 it is the Taylor polynomial of degree 9, whose first term left out is 3e-8 of it.
    """
    y = x * np.float32(1 / 9) + np.float32(1.0)
    y = y * (x * np.float32(1 / 8)) + np.float32(1.0)
    y = y * (x * np.float32(1 / 7)) + np.float32(1.0)
    y = y * (x * np.float32(1 / 6)) + np.float32(1.0)
    y = y * (x * np.float32(1 / 5)) + np.float32(1.0)
    y = y * (x * np.float32(1 / 4)) + np.float32(1.0)
    y = y * (x * np.float32(1 / 3)) + np.float32(1.0)
    small = y * (x * x * np.float32(0.5))
    return small if x > np.float32(-0.5) else exp(x) - np.float32(1.0) - x


@compiled_with("contract")
def silu(x, slope):
    """Returns x * sigmoid(slope * x), slope a float32."""
    return x / (np.float32(1.0) + exp(min(-(slope * x), np.float32(88.0))))


@compiled_with("contract")
def sigmoid(x):
    """Returns 1 / (1 + e**-x), at least 6e-39."""
    return np.float32(1.0) / (np.float32(1.0) + exp(min(-x, np.float32(88.0))))


@compiled_with("contract")
def softplus(x):
    """Returns log(1 + e**x), to 4 units in the last place.

    It is ``max(x, 0) + log(1 + t)`` with ``t = e**-|x|``, and ``log(1 + t) = 2 artanh(t / (2 +
    t))``, by the first eight terms of the series of artanh.
    """
    t = exp(-max(-x, x))
    s = t / (np.float32(2.0) + t)
    square = s * s
    y = np.float32(2 / 15)
    y = y * square + np.float32(2 / 13)
    y = y * square + np.float32(2 / 11)
    y = y * square + np.float32(2 / 9)
    y = y * square + np.float32(2 / 7)
    y = y * square + np.float32(2 / 5)
    y = y * square + np.float32(2 / 3)
    y = y * square + np.float32(2.0)
    return max(x, np.float32(0.0)) + y * s


@compiled_with("contract")
def tanh(x):
    """Returns the hyperbolic tangent, to 2 units in the last place.

    Below 0.625 it is an odd polynomial of degree 11, which approximates tanh with a relative error
    of 1.4e-7 in the factor of x**3; above that, ``1 - 2 / (e**(2 |x|) + 1)``.
    """
    size = max(-x, x)
    beyond = np.float32(1.0) - np.float32(2.0) / (
        exp(min(np.float32(20.0), size + size)) + np.float32(1.0)
    )
    signed = beyond if x > np.float32(0.0) else -beyond
    square = x * x
    y = np.float32(-0.006096937)
    y = y * square + np.float32(0.020997354)
    y = y * square + np.float32(-0.05385095)
    y = y * square + np.float32(0.1333277)
    y = y * square + np.float32(-0.3333333)
    small = x + x * (square * y)
    return signed if size > np.float32(0.625) else small  # a NaN stays one


@compiled_with("contract")
def erfc(x):
    """Returns the complementary error function, to a relative error of 1e-6 where x is below 4;
    where the result is smaller, the error grows with x**2 to 6e-6.

    For x >= 0 it is ``t * q(t) * e**(-x**2)`` with ``t = 1 / (1 + x / 2)``. The polynomial q of
    degree 8 has a relative error of 5e-8.
    """
    size = max(-x, x)
    t = np.float32(1.0) / (np.float32(1.0) + size * np.float32(0.5))
    y = np.float32(-0.0588909135)
    y = y * t + np.float32(0.283702595)
    y = y * t + np.float32(-0.485384907)
    y = y * t + np.float32(0.275979397)
    y = y * t + np.float32(-0.0251784408)
    y = y * t + np.float32(0.20207011)
    y = y * t + np.float32(0.243260949)
    y = y * t + np.float32(0.282353491)
    y = y * t + np.float32(0.282087676)
    right = t * y * exp(-(size * size))
    return np.float32(2.0) - right if x < np.float32(0.0) else right


@compiled_with("contract")
def relu_squared(x):
    """Returns the square of x, or 0 below 0 (So et al., 2021)."""
    positive = max(x, np.float32(0.0))
    return positive * positive


@compiled_with("contract")
def quick_gelu(x):
    """Returns ``x * sigmoid(1.702 * x)``, which approximates `gelu` (Hendrycks and Gimpel,
    2016)."""
    return silu(x, np.float32(1.702))


@compiled_with("contract")
def gelu(x):
    """Returns x times the normal distribution's probability of a number below x (Hendrycks and
    Gimpel, 2016)."""
    return np.float32(0.5) * x * erfc(x * np.float32(-math.sqrt(0.5)))


@compiled_with("contract")
def gelu_tanh(x):
    """Returns ``x / 2 * (1 + tanh(u))``, ``u = sqrt(2 / pi) * (x + 0.044715 * x**3)``, which
    approximates `gelu`: the same as x * sigmoid(2 u)."""
    slope = np.float32(0.044715) * (x * x) + np.float32(1.0)
    return silu(x, slope * np.float32(math.sqrt(8 / math.pi)))
