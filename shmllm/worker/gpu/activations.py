"""The activations of dense MLPs on a GPU, of whole products."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.mlp import MLP
from shmllm_kernels.gpu.activation import activate, activate_sparse
from shmllm_kernels.gpu.xielu import xielu


def needs_whole_product(mlp: MLP) -> bool:
    """Return whether no product computes the activation of its tile: it has numbers of its own, a
    bound, depends on all gates of a token, or adapters add to its input."""
    has_more = mlp.learned is not None or bool(mlp.gate_up_proj.adapters)
    return has_more or mlp.spec.sparsity > 0 or mlp.spec.bound is not None


def activate_mlp(out: Tensor, projected: Tensor, mlp: MLP) -> None:
    """Write what an MLP's last product reads.

    Args:
        out: [tokens, inner].
        projected: [tokens, inner], or [tokens, 2 * inner], gates and ups.
        mlp: the MLP.
    """
    spec = mlp.spec
    if mlp.learned is not None:
        xielu(out, projected, mlp.learned)
    elif spec.sparsity:
        activate_sparse(out, projected, spec.activation, spec.deviations)
    else:
        activate(out, projected, spec.activation, spec.gated, spec.bound)
