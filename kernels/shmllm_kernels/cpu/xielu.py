"""The activation xIELU (Huang and Schlag, 2024), whose numbers a model learns for each layer.

All activations are float32. A row's result depends on that row alone: one thread computes it from
beginning to end.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.functions import exp_remainder, softplus
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_with
from shmllm_kernels.cpu.memory import floats, word
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece


@compiled_with("contract")
def _xielu(x, squared, exponential, linear, bound):
    below = min(x, bound)
    negative = (exp_remainder(below) + (below - x)) * exponential
    curved = squared * x * x if x > np.float32(0.0) else negative
    return curved + linear * x


@compiled
def _run(operands, piece, thread, num_threads):
    source, out, width = word(operands, 1), word(operands, 2), word(operands, 3)
    learned = floats(word(operands, 4))
    linear, bound = learned[2], learned[3]
    squared, exponential = softplus(learned[0]), softplus(learned[1]) + linear
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        numbers, values = floats(source + row * width * 4), floats(out + row * width * 4)
        for i in range(width):
            values[i] = _xielu(numbers[i], squared, exponential, linear, bound)


XIELU = Kernel(count_pieces, _run)
"""``softplus(p) * x**2 + b * x`` above 0, else ``(softplus(n) + b) * (exp(min(x, e)) - 1 - x) +
b * x``.

Operands: address of the number of rows; x [rows, width]; out [rows, width]; width; address of p, n,
b and e, float32, of which e is below 0.
"""
