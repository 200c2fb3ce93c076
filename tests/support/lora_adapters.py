"""Random low-rank adapters on disk, as PEFT writes them, and the models that they amount to."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.one_thread import one_thread
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FACTOR = 0.3
"""Of the matrices: what an adapter adds is as large as a tenth of the base's product, and more."""


def linear_modules(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """The [out, in] of the modules that PEFT adapts, by name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            found[name] = (module.weight.shape[1], module.weight.shape[0])
    return found


def draw(
    shapes: dict[str, tuple[int, int]],
    seed: int = 0,
    rank: int | Callable[[str], int] = 8,
    factor: float = FACTOR,
) -> dict[str, Tensor]:
    """Random A and B of modules, under the names of adapter_model.safetensors.

    Args:
        shapes: [out, in] of each module.
        seed: of the random numbers.
        rank: of all modules, or a function of a module's name.
        factor: of the matrices; B has a factor of its own, which makes outputs as large.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, width) in shapes.items():
        r = rank if isinstance(rank, int) else rank(name)
        a = torch.randn(r, width, generator=generator) / width**0.5
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a * factor
        b = torch.randn(rows, r, generator=generator) / r**0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b * factor
    return tensors


def write(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Writes an adapter; `config`: fields of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(fields | config))
    return directory


@one_thread()
@torch.no_grad()
def merged(
    model: PreTrainedModel, tensors: dict[str, Tensor], scale: float | Callable[[str], float]
) -> PreTrainedModel:
    """A copy of a model with ``W + scale * B A`` in place of each W."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        a = tensors.get(f"{PREFIX}{name}.lora_A.weight")
        if a is not None:
            own = scale if isinstance(scale, float) else scale(name)
            change = own * tensors[f"{PREFIX}{name}.lora_B.weight"] @ a
            weight: Any = module.weight
            weight += change.T if isinstance(module, Conv1D) else change
    return model


def with_suffixes(
    shapes: dict[str, tuple[int, int]], suffixes: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """The modules whose names end so."""
    ends = tuple(f".{suffix}" for suffix in suffixes)
    return {name: shape for name, shape in shapes.items() if name.endswith(ends)}
