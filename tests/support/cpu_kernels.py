"""Runs a single CPU kernel, and skips what this CPU lacks."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from shmllm_kernels.cpu import Kernel, KernelProgram
from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16, HAS_INT8

NEEDS_BFLOAT16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="the CPU lacks AVX512_BF16")
NEEDS_INT8 = pytest.mark.skipif(not HAS_INT8, reason="the CPU lacks AVX512_VNNI and AVX2")


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


def guarded(num_bytes: int) -> Tensor:
    """Returns memory, uint8, all 0xff, that ends where no access is possible: a kernel that reads
    or writes after it ends the test process."""
    size = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    last_page = ctypes.c_void_p(memory.data_ptr() + size)
    assert protect(last_page, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return memory[size - num_bytes : size].fill_(0xFF)
