"""The decoder's operations on a CPU, compiled by LLVM for the machine that they run on."""

from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.cpu.tape import Kernel, Tape

__all__ = ["Kernel", "Tape", "word_of_float"]
