"""Records the tables of the cosines and sines by which a step's heads are rotated."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from shmllm.models.config import RopeConfig
from shmllm.models.rope import attention_factor, axes, inverse_frequencies
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.rows import ROPE_TABLES


def record_rope_tables(
    program: KernelProgram,
    inputs: CpuInputs,
    num_tokens: int,
    rope: RopeConfig,
    angles: tuple[Tensor, Tensor],
    positions: LongArray | None = None,
) -> None:
    """Record the tables of a rotation.

    Args:
        program: the program.
        inputs: the step's inputs, whose positions it reads.
        num_tokens: the address of the number of tokens.
        rope: the rotation.
        angles: cosines and sines, each [max_tokens, rotary_dim], which it writes.
        positions: (max_tokens,) int64; None: those of the step's tokens.
    """
    frequencies, of_pairs = inverse_frequencies(rope), np.array(axes(rope), np.int64)
    on_axes = inputs.rope_positions if rope.sections else None
    if positions is None:
        positions = inputs.positions if on_axes is None else on_axes
    addresses = [positions.ctypes.data, frequencies.data_ptr()]
    tables = [table.data_ptr() for table in angles]
    scale = word_of_float(attention_factor(rope))
    operands = [num_tokens, *addresses, len(frequencies), *tables, scale]
    if on_axes is not None:
        operands += [of_pairs.ctypes.data, on_axes.strides[0]]
    kernel, keep = ROPE_TABLES[on_axes is not None], [frequencies, of_pairs]
    program.record(kernel, operands, keep=keep, label="rope_tables")
