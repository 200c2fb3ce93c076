"""Runs a single CPU kernel."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from shmllm_kernels.cpu import Kernel, KernelProgram


def run_kernel(kernel: Kernel, rows: int, *operands: Tensor | int, num_threads: int = 2) -> None:
    """Runs a kernel whose first operand is the address of the number of rows.

    Args:
        kernel: the kernel.
        rows: the number of rows.
        operands: the other operands; a tensor stands for its address.
        num_threads: the number of threads.
    """
    num_rows = np.array([rows])
    numbers = [o.data_ptr() if isinstance(o, Tensor) else o for o in operands]
    program = KernelProgram(num_threads)
    program.record(kernel, [num_rows.ctypes.data, *numbers])
    program.replay()
