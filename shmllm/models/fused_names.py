"""Names of projections that a checkpoint has in one tensor, and the default names have apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shmllm.models.layers import NamedWeights
from shmllm.models.matrices import Destination, Matrix, WholeMatrix, joined
from shmllm.models.quantized import QuantizedMatrix

QKV = "qkv_proj", ("q_proj", "k_proj", "v_proj")
GATE_UP = "gate_up_proj", ("gate_proj", "up_proj")


def with_fused(weights: NamedWeights, *fused: tuple[str, Sequence[str]]) -> NamedWeights:
    """Returns destinations under a checkpoint's names.

    Args:
        weights: the destinations under the default names.
        fused: the name of each fused projection, and those of its parts, in the order of their
            rows.
    """
    return _with_joined(weights, fused, joined)


def with_fused_groups(
    weights: NamedWeights, fused: tuple[str, Sequence[str]], num_groups: int
) -> NamedWeights:
    """As `with_fused`, where the rows of each group's parts are side by side, group by group: the
    queries of some heads, and the key and the value that these read.

    Args:
        weights: the destinations under the default names.
        fused: the name of the fused projection, and those of its parts.
        num_groups: the number of groups, which divides the rows of each part.
    """

    def by_group(parts: Sequence[Matrix]) -> Matrix:
        groups = zip(*(_equal_parts(part, num_groups) for part in parts), strict=True)
        return joined([rows for group in groups for rows in group])

    return _with_joined(weights, (fused,), by_group)


def gates_and_ups(view: Destination) -> tuple[Matrix, Matrix]:
    """Returns the gates and the ups of all experts, each one below the other, of [experts, gate and
    up side by side, hidden]."""
    assert isinstance(view, Tensor | QuantizedMatrix), "a tensor of a file has one format"
    count, rows, width = view.shape
    flat: WholeMatrix = view.view(-1, width)
    parts = flat.split_with_sizes([rows // 2] * (2 * count))
    return joined(parts[::2]), joined(parts[1::2])


def with_shared(weights: NamedWeights, part: str, name: str) -> NamedWeights:
    """Returns destinations in which those of all layers have one name, since the layers share what
    each of them keeps.

    Args:
        weights: the destinations.
        part: what is in the names of the shared ones.
        name: their name in a checkpoint.
    """
    found: NamedWeights = {}
    for own, views in weights.items():
        joint = name if part in own else own
        found[joint] = (*found.get(joint, ()), *views)
    return found


def _equal_parts(rows: Matrix, count: int) -> Sequence[Matrix]:
    return rows.split_with_sizes([rows.shape[0] // count] * count)


def _with_joined(
    weights: NamedWeights,
    fused: Sequence[tuple[str, Sequence[str]]],
    join: Callable[[Sequence[Matrix]], Matrix],
) -> NamedWeights:
    found: NamedWeights = {}
    whole = {parts[0]: (name, parts) for name, parts in fused}
    others = {part for _, parts in fused for part in parts[1:]}
    for name, views in weights.items():
        prefix, projection, kind = _split(name)
        if projection in whole:
            fused_name, parts = whole[projection]
            columns = zip(*(weights[f"{prefix}{part}{kind}"] for part in parts), strict=True)
            found[f"{prefix}{fused_name}{kind}"] = tuple(join(views) for views in columns)
        elif projection not in others:
            found[name] = views
    return found


def _split(name: str) -> tuple[str, str, str]:
    """Splits "model.layers.0.mlp.up_proj.weight" before and behind its projection."""
    head, _, kind = name.rpartition(".")
    prefix, dot, projection = head.rpartition(".")
    return prefix + dot, projection, f".{kind}"
