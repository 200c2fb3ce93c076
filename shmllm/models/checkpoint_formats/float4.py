"""Numbers in the format e2m1. NVFP4 has a scale in the format e4m3 for each 16 and one for all,
MXFP4 a power of two for each 32. Methods share this.
"""

from __future__ import annotations

from shmllm.models.checkpoint_formats.components import Components
from shmllm.models.checkpoint_formats.stored import NibbleMatrix, float8_of_runs, powers_of_runs

GROUP = 16


def float4_shape(parts: Components, main: str) -> tuple[int, int]:
    """Returns the shape of a weight whose bytes have two neighbours each."""
    rows, num_bytes = parts.header(main, ("U8",), (None, None)).shape
    return rows, 2 * num_bytes


def nvfp4_matrix(parts: Components, main: str, scale: str, is_divisor: bool) -> NibbleMatrix:
    """
    Args:
        parts: the components; those of groups are ``.weight_scale``.
        main: the end of the name of the numbers.
        scale: that of the scale of all groups.
        is_divisor: whether the groups' scales are divided by it.
    """
    rows, width = float4_shape(parts, main)
    if width % GROUP:
        raise parts.error(main, f"has rows of {width} elements, no multiple of {GROUP}")
    factors = parts.factors(".weight_scale", (rows, width // GROUP))
    one = parts.scales(scale).float()
    if one.numel() != 1 or float(one) == 0:
        raise parts.error(scale, "must be one number, and not 0")
    parameters = float8_of_runs(factors, 1 / one if is_divisor else one)
    return NibbleMatrix("nvfp4", (rows, width), parameters)


def mxfp4_matrix(parts: Components, main: str, scale: str) -> NibbleMatrix:
    """scale: the end of the name of the powers of two, one for each 32 elements."""
    rows, width = float4_shape(parts, main)
    powers = parts.powers(scale, (rows, -(-width // 32)))
    return NibbleMatrix("mxfp4", (rows, width), powers_of_runs(powers))
