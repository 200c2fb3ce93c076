"""Triton kernels of the decoder and the sampler, with functions that launch them.

A launch allocates no memory, copies nothing to the host and writes only to its arguments, so a CUDA
graph can capture it. It goes to the current device and stream. Each function asserts shapes, dtypes
and strides first. If ``TRITON_INTERPRET=1`` is set before Triton is imported, the same kernels run
on CPU tensors.
"""
