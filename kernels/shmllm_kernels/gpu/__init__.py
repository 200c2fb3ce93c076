"""Triton kernels of the decoder and the sampler, each behind a function that launches it.

A launch allocates nothing, reads nothing back and writes only where its arguments say, so it
can be captured in a CUDA graph; it goes to the current device and stream. Shapes, dtypes and
strides are asserted before it. With ``TRITON_INTERPRET=1`` set before Triton is imported, the
same kernels run on CPU tensors.
"""
