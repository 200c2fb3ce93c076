"""Which family the model of a GGUF file is of, and how many layers it has.

This module must not know the fields of config.json, nor import torch.
"""

from __future__ import annotations

import re
from dataclasses import replace

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.gguf_families import FAMILIES
from shmllm.formats.gguf_family import GgufFamily, as_place
from shmllm.formats.gguf_projectors import ARCHITECTURE as PROJECTOR
from shmllm.formats.gguf_projectors import projector_of

_LAYER = re.compile(r"blk\.(\d+)\.")
_ATTENTION = re.compile(r"blk\.(\d+)\.attn_output\.weight")


def family_of(header: GgufHeader) -> GgufFamily:
    """Returns the family of a file's model.

    Raises:
        EngineStartError: the file has another model; the message names those that run.
    """
    if header.architecture == PROJECTOR:
        return projector_of(header)
    family = _tiled(_listed(header)) if is_tiled(header) else _listed(header)
    family = family.form(
        lambda module, _: any(name.endswith(f".{module}.weight") for name in header.tensors)
    )
    if not family.in_attention:
        return family
    found = filter(None, map(_ATTENTION.fullmatch, header.tensors))
    return replace(family, attention_layers=frozenset(match[1] for match in found))


def _listed(header: GgufHeader) -> GgufFamily:
    """Returns the row of a file's model."""
    name = header.architecture
    has_experts = bool(header.metadata.get(f"{name}.expert_count"))
    if (name, has_experts) in FAMILIES:
        return FAMILIES[name, has_experts]
    kind = " with experts" if has_experts and (name, False) in FAMILIES else ""
    raise header.error(
        f"architecture {shown(name)}{kind} is not supported; supported: "
        f"{', '.join(dict.fromkeys(known for known, _ in FAMILIES))}"
    )


def is_tiled(header: GgufHeader) -> bool:
    """Returns whether the value heads of delta nets have another order than a checkpoint's; see
    `GgufFamily.has_tiled_heads`."""
    name, known = header.architecture, header.metadata
    if not _listed(header).has_tiled_heads:
        return False
    return known.get(f"{name}.ssm.time_step_rank") != known.get(f"{name}.ssm.group_count")


def _tiled(family: GgufFamily) -> GgufFamily:
    """Returns the family under the names of delta nets whose value heads have another order."""
    places = {module: as_place(at) for module, at in family.modules.items()}
    modules = {
        module: replace(at, name=at.name.replace("linear_attn.", "linear_attn_tiled."))
        for module, at in places.items()
    }
    return replace(family, modules=modules)


def layers_of(header: GgufHeader) -> tuple[int, int]:
    """Returns the number of layers of a file's model, and how many behind these predict further
    tokens.

    Raises:
        EngineStartError: the metadata do not say it.
    """
    name, known = header.architecture, header.metadata
    count, further = known.get(f"{name}.block_count"), known.get(f"{name}.nextn_predict_layers", 0)
    if type(count) is not int or type(further) is not int or not 0 <= further < count:
        raise header.error(
            f"{name}.block_count must be a positive whole number above nextn_predict_layers; found "
            f"{shown(count)} and {shown(further)}"
        )
    return count - further, further


def further_prefixes(header: GgufHeader) -> tuple[str, ...]:
    """Returns what the names of the tensors begin with that predict further tokens."""
    if not header.metadata.get(f"{header.architecture}.nextn_predict_layers"):
        return ()
    count, further = layers_of(header)
    numbers = {match[1] for match in map(_LAYER.match, header.tensors) if match is not None}
    return tuple(f"blk.{each}." for each in numbers if 0 <= int(each) - count < further)


def family_of_class(architecture: str, has_experts: bool) -> tuple[str, GgufFamily] | None:
    """Returns llama.cpp's architecture and the family of one of transformers' classes, of two
    families that with or without experts; None if no file of such a model can be written."""
    found = [
        (with_experts != has_experts, name, family)
        for (name, with_experts), family in FAMILIES.items()
        if family.is_written and architecture in family.classes
    ]
    return min(found, key=lambda each: each[0])[1:] if found else None


def written_families() -> list[tuple[str, GgufFamily]]:
    """Returns llama.cpp's architectures and the families of which files can be written."""
    every = ((name, family) for (name, _), family in FAMILIES.items())
    return [(name, family) for name, family in every if family.is_written]
