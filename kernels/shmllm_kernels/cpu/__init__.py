"""The decoder's operations on a CPU. LLVM compiles them for the machine that they run on."""

from shmllm_kernels.cpu.kernel_program import Kernel, KernelProgram
from shmllm_kernels.cpu.memory import word_of_float

__all__ = ["Kernel", "KernelProgram", "word_of_float"]
