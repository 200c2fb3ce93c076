"""The decoder's operations on a CPU, compiled by numba (LLVM) for the machine that it runs on."""

from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.cpu.tape import Kernel, Tape, keep_compiled_code

__all__ = ["Kernel", "Tape", "word_of_float"]

keep_compiled_code()
