"""Triton kernels of the decoder and the sampler, with functions that launch them.

A launch allocates no memory, copies nothing to the host and writes only to its arguments, so a CUDA
graph can capture it. It goes to the current device and stream. Each function asserts shapes, dtypes
and strides first. If ``TRITON_INTERPRET=1`` is set before Triton is imported, the same kernels run
on CPU tensors.

The docstrings state bytes, flops and launches, and the time that these predict for Llama-3.1-8B in
bfloat16 (32 layers; hidden size 4,096, MLP 14,336; 32 heads and 8 kv heads of 128 elements) on an
H200. The predictions assume 4.3 TB/s for bytes read and written, 788 TFLOP/s, and 2 us for a launch
in a graph that moves little: the gap to the launch before, and a load and a store one after the
other. An H100 copies about 3.0 TB/s. An H200 confirmed the rates (4.26 TB/s, 793 TFLOP/s) and the
launches (0.8 to 1.1 us and what they wait for); docs/gpu.md has what a step takes. A decode of one
token has 5 launches a layer and 8 more. Other decodes have 8 a layer, prompts 9, or 10 if contexts
are split, of which 4 are products. All but products and attention together take 11 ms of a prompt
of 8,192 tokens.
"""
