"""Tensor operations of the decoder: tensors in, tensors out, no knowledge of an engine.

`reference` defines each operation in torch. `gpu` holds the Triton kernels that compute the
same; importing this package does not import them, since Triton decides at its import whether
it compiles or interprets.
"""

from shmllm_kernels.reference.activation import silu_and_mul
from shmllm_kernels.reference.norm import add_rms_norm, rms_norm
from shmllm_kernels.reference.rope import apply_rope, rotate

__all__ = ["add_rms_norm", "apply_rope", "rms_norm", "rotate", "silu_and_mul"]
