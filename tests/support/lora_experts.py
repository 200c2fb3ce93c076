"""Random low-rank adapters of experts, in both forms of PEFT, and the models that they amount to.

transformers' modules have the weights of all experts in one parameter. PEFT adapts that under the
name of its module ("fused"). Adapters for older modules have matrices for each expert's projections
("separate").
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from support.lora_adapters import FACTOR, PREFIX
from support.one_thread import one_thread
from torch import Tensor
from transformers import PreTrainedModel

PARAMETERS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]
"""For the field `target_parameters`."""
SEPARATE = {
    "mixtral": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    "qwen2_moe": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}
SEPARATE["qwen3_moe"] = SEPARATE["qwen2_moe"]
SEPARATE["nemotron_h"] = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""The projections of each expert that a parameter has together, by the type of the model."""


class Change(NamedTuple):
    """What an adapter adds to some rows of one expert: ``scale * b @ a``."""

    parameter: str
    expert: int
    rows: slice
    a: Tensor
    b: Tensor


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """The name of each module of experts, and its parameters with [experts, out, in]."""
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        if module.endswith(".experts") and parameter.dim() == 3:
            experts, rows, width = parameter.shape
            if getattr(model.get_submodule(module), "is_transposed", False):
                rows, width = width, rows
            yield module, own, (experts, rows, width)


def _drawn(
    rows: int, width: int, ranks: int, rank: int, generator: torch.Generator
) -> list[Tensor]:
    a = torch.randn(ranks, width, generator=generator) / width**0.5
    return [a * FACTOR, torch.randn(rows, ranks, generator=generator) / rank**0.5 * FACTOR]


def fused(
    model: PreTrainedModel, seed: int, rank: int, factor: float = 1.0
) -> tuple[dict[str, Tensor], list[Change]]:
    """Draws an adapter of the parameters.

    Args:
        model: the model.
        seed: of the random numbers.
        rank: of each expert.
        factor: of all matrices.

    Returns:
        The tensors under PEFT's names, A [rank of every expert, in] and B [out, every rank of the
        experts in turn], and what they change.
    """
    generator, tensors, changes = torch.Generator().manual_seed(seed), {}, []
    for module, own, (experts, rows, width) in _parameters(model):
        a, b = _drawn(rows, width, rank * experts, rank, generator)
        name = f"{PREFIX}{module}{'' if own == 'down_proj' else '.base_layer'}"
        tensors[f"{name}.lora_A.weight"] = a = a * factor
        tensors[f"{name}.lora_B.weight"] = b = b * factor
        for expert in range(experts):
            own_a, own_b = a[expert * rank : (expert + 1) * rank], b[:, expert::experts]
            changes.append(Change(f"{module}.{own}", expert, slice(0, rows), own_a, own_b))
    return tensors, changes


def separate(
    model: PreTrainedModel, seed: int, rank: int, factor: float = 1.0
) -> tuple[dict[str, Tensor], list[Change]]:
    """Draws an adapter of each expert's projections, likewise; every third expert has none."""
    generator, tensors, changes = torch.Generator().manual_seed(seed), {}, []
    kind = model.config.model_type
    for module, own, (experts, rows, width) in _parameters(model):
        names = SEPARATE[kind][own]
        path = module.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else module
        size = rows // len(names)
        for expert in range(experts):
            for index, name in enumerate(names if expert % 3 != 2 else ()):
                a, b = (m * factor for m in _drawn(size, width, rank, rank, generator))
                key = f"{PREFIX}{path}.{expert}.{name}"
                tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
                some = slice(index * size, (index + 1) * size)
                changes.append(Change(f"{module}.{own}", expert, some, a, b))
    return tensors, changes


@one_thread()
@torch.no_grad()
def merged(model: PreTrainedModel, changes: list[Change], scale: float) -> PreTrainedModel:
    """A copy of a model with the changes added to its weights."""
    model = copy.deepcopy(model)
    for change in changes:
        weight = model.get_parameter(change.parameter)[change.expert]
        module = model.get_submodule(change.parameter.rpartition(".")[0])
        weight = weight.T if getattr(module, "is_transposed", False) else weight
        weight[change.rows] += scale * change.b @ change.a
    return model
