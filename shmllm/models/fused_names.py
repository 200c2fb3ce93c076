"""Names of projections that a checkpoint has in one tensor, and the default names have apart."""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.models.layers import NamedWeights
from shmllm.models.matrices import joined

QKV = "qkv_proj", ("q_proj", "k_proj", "v_proj")
GATE_UP = "gate_up_proj", ("gate_proj", "up_proj")


def with_fused(weights: NamedWeights, *fused: tuple[str, Sequence[str]]) -> NamedWeights:
    """Returns destinations under a checkpoint's names.

    Args:
        weights: the destinations under the default names.
        fused: the name of each fused projection, and those of its parts, in the order of their
            rows.
    """
    found: NamedWeights = {}
    whole = {parts[0]: (name, parts) for name, parts in fused}
    others = {part for _, parts in fused for part in parts[1:]}
    for name, views in weights.items():
        prefix, projection, kind = _split(name)
        if projection in whole:
            fused_name, parts = whole[projection]
            columns = zip(*(weights[f"{prefix}{part}{kind}"] for part in parts), strict=True)
            found[f"{prefix}{fused_name}{kind}"] = tuple(joined(views) for views in columns)
        elif projection not in others:
            found[name] = views
    return found


def _split(name: str) -> tuple[str, str, str]:
    """Splits "model.layers.0.mlp.up_proj.weight" before and behind its projection."""
    head, _, kind = name.rpartition(".")
    prefix, dot, projection = head.rpartition(".")
    return prefix + dot, projection, f".{kind}"
