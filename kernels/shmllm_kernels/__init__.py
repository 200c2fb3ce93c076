"""Tensor operations of the decoder and the sampler. They must not know an engine.

`reference` defines the operations in torch, `gpu` has Triton kernels for them, and `cpu` has the
kernels of the forward pass on a CPU, which LLVM compiles. This module must not import them: each
needs its own compiler, and Triton decides at its import whether it compiles or interprets.
"""
