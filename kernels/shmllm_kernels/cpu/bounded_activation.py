"""The activation of an MLP whose gates and ups are bounded.

All activations are float32. A row's result depends on that row alone: one thread computes it from
beginning to end.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.functions import silu
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import float_of_word, floats, word
from shmllm_kernels.cpu.rows import ACTIVATIONS, activation, count_pieces, rows_of_piece

SILU_CLAMPED = "silu_clamped"
SILU_SHIFTED = "silu_shifted"
_SLOPE = 1.702


@compiled
def shifted_product(gate, up, bound):
    """Returns ``(u + 1) * g * sigmoid(1.702 * g)`` of bounded numbers g and u."""
    factor = max(min(up, bound), -bound) + np.float32(1.0)
    return silu(min(gate, bound), np.float32(_SLOPE)) * factor


@compiled
def opened(gate, bound, name):
    """Returns ``min(f(gate), bound)``, or with SILU_CLAMPED ``silu(min(gate, bound))``."""
    if name == SILU_CLAMPED:
        return activation(min(gate, bound), "silu")
    return min(activation(gate, name), bound)


@compiled
def _activate_bounded(operands, piece, thread, num_threads, name):
    source, out, width = word(operands, 1), word(operands, 2), word(operands, 3)
    bound = float_of_word(word(operands, 4))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        place = source + row * width * 8
        gate, up, values = floats(place), floats(place + width * 4), floats(out + row * width * 4)
        for i in range(width):
            if name == SILU_SHIFTED:
                values[i] = shifted_product(gate[i], up[i], bound)
            else:
                values[i] = opened(gate[i], bound, name) * max(min(up[i], bound), -bound)


ACTIVATE_BOUNDED = {
    name: Kernel(count_pieces, _activate_bounded, name)
    for name in (*ACTIVATIONS, SILU_CLAMPED, SILU_SHIFTED)
}
"""Kernels by the activation's name. ``out = opened(gate, bound) * min(max(up, -bound), bound)``,
see `opened`, or what `shifted_product` returns.

Operands: address of the number of rows; x [rows, 2 * width], gates and ups side by side; out
[rows, width]; width; the bound, a number from `word_of_float`.
"""
