"""Runs a model on a CPU, with kernels that LLVM compiles for the machine."""
