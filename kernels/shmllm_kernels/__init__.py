"""Tensor operations of the decoder: tensors in, tensors out, no knowledge of an engine.

The functions here are the torch references and the CPU path. They return new tensors and
leave their inputs as they were, but for the residual stream of ``add_rms_norm``.
"""

from shmllm_kernels.activation import silu_and_mul
from shmllm_kernels.norm import add_rms_norm, rms_norm
from shmllm_kernels.rope import apply_rope, rotate

__all__ = ["add_rms_norm", "apply_rope", "rms_norm", "rotate", "silu_and_mul"]
