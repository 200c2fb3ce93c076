"""Triton kernels of the decoder and the sampler, with functions that launch them.

A launch allocates no memory, copies nothing to the host and writes only to its arguments, so a CUDA
graph can capture it. It goes to the current device and stream. Each function asserts shapes, dtypes
and strides first. If ``TRITON_INTERPRET=1`` is set before Triton is imported, the same kernels run
on CPU tensors.

The docstrings state bytes, flops and launches, and the time that these predict for Llama-3.1-8B in
bfloat16 (32 layers; hidden size 4,096, MLP 14,336; 32 heads and 8 kv heads of 128 elements) on an
H200. The predictions assume 4.3 TB/s for bytes read and written, 788 TFLOP/s, and 2 us for a launch
in a graph that moves little: the gap to the launch before, and a load and a store one after the
other. An H100 copies about 3.0 TB/s. No measurement has confirmed a prediction. A step has 10
launches a layer, of which 4 are products and one exists only if contexts are split, and 5 more:
325. All but products and attention together take 0.3 ms of a decode of one token, and 11 ms of a
prompt of 8,192 tokens.
"""
