"""Tensor operations of the decoder, without knowledge of an engine.

`reference` defines operations in torch, `gpu` has Triton kernels for them, and `cpu` what the
CPU's forward pass is made of. None of them is imported here: each needs a compiler of its own,
and Triton decides at its import whether it compiles or interprets.
"""
