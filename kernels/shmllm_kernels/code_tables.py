"""The numbers that codes of 3 or 4 bits stand for, by code; all devices share them.

The highest bit of a code is its number's sign, but for IQ4 and NF4, whose numbers ascend.
"""

from __future__ import annotations


def _with_signs(*magnitudes: float) -> tuple[float, ...]:
    return (*magnitudes, *(-each for each in magnitudes))


E2M1 = _with_signs(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""A sign, two bits of exponent, and one of mantissa (OCP's MX formats)."""
IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
"""IQ4_NL and IQ4_XS of llama.cpp (kvalues_iq4nl of ggml-common.h)."""
IQ3_S = _with_signs(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
IQ3_XXS = _with_signs(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)
IQ2 = _with_signs(1.0, 3.125, 5.375, 5.375)
IQ1 = _with_signs(0.125, 0.875, 1.125, 1.125)
"""All numbers in the grids of these types of llama.cpp (ggml-common.h), of IQ3_XXS divided by 4 and
of IQ2 by 8; of IQ1, 1/8 more and less than -1, 0 and 1. The last magnitude of these two has two
codes."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, in float32 (QLoRA; bitsandbytes)."""
