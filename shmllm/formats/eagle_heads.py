"""Reads the configuration of a model that drafts from hidden states (EAGLE) in one form, whoever
trained it.

Checkpoints of the library speculators have the fields of the layer in an object of its own, and
others the architecture's name in another order. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shmllm.errors import EngineStartError
from shmllm.formats.processor_files import read_object

EAGLE = {"llama": "EagleLlamaForCausalLM", "qwen2": "EagleQwen2ForCausalLM"}
"""The name of the architecture of EAGLE 1 and 2 by the ``model_type`` of its layer."""
EAGLE3 = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""That of EAGLE-3."""
PREFIXES = {"eagle": "Eagle", "eagle3": "Eagle3"}
"""What vLLM's names of methods put before the name of the architecture of a layer."""
_OTHER_NAMES = {
    "LlamaForCausalLMEagle": EAGLE["llama"],
    "Qwen2ForCausalLMEagle": EAGLE["qwen2"],
    "LlamaForCausalLMEagle3": EAGLE3["llama"],
    "Eagle3MiniMaxM2ForCausalLM": EAGLE3["llama"],
    "Eagle3Qwen2_5vlForCausalLM": EAGLE3["llama"],
    "Eagle3Qwen3vlForCausalLM": EAGLE3["llama"],
    "PEagleDraftModel": EAGLE3["llama"],
    "PeagleLlamaForCausalLM": EAGLE3["llama"],
    "PeagleQwen3ForCausalLM": EAGLE3["qwen3"],
}
_TYPE, _LAYER = "speculators_model_type", "transformer_layer_config"
_DEFAULTS = {"eagle3": {"norm_before_residual": True}, "peagle": {"norm_before_residual": False}}
"""The fields that vLLM takes for absent ones, by the kinds of heads that are supported."""


class Verifier(NamedTuple):
    """The model that a head of the library speculators was trained for.

    name: its name.
    num_tokens: how many tokens the head drafts at a time, or None.
    """

    name: str
    num_tokens: int | None


def verifier_of(directory: Path) -> Verifier | None:
    """Returns the model that a head in a directory was trained for, if its config.json says so.

    Raises:
        EngineStartError: the file cannot be read.
    """
    values = read_object(directory / "config.json") or {}
    config = values.get("speculators_config")
    if _TYPE not in values or not isinstance(config, Mapping):
        return None
    verifier, methods = config.get("verifier"), config.get("proposal_methods")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    method = methods[0] if isinstance(methods, list) and methods else None
    count = method.get("speculative_tokens") if isinstance(method, Mapping) else None
    return Verifier(name, count) if isinstance(name, str) and name else None


def in_terms_of_vllm(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the content of config.json of such a head as vLLM's classes have it; any other as it
    is.

    Args:
        values: the content.
        where: its name in messages.

    Raises:
        EngineStartError: it is of another kind of head, or a field is no object.
    """
    if (kind := values.get(_TYPE)) is not None:
        return _read_speculators(values, kind, where)
    if values.get("model_type") == "eagle" and isinstance(layer := values.get("model"), Mapping):
        values = {**layer, **values, **_named_for(layer, values.get("method") or "eagle")}
    names = values.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if isinstance(first, str) and first in _OTHER_NAMES:
        return {**values, "architectures": [_OTHER_NAMES[first]]}
    return dict(values)


def _named_for(layer: Mapping[str, Any], method: object) -> dict[str, Any]:
    """Returns the fields of a head whose layer is described as a model, for one of `PREFIXES`."""
    names, prefix = layer.get("architectures"), PREFIXES.get(str(method))
    fields = {"model": None, "model_type": layer.get("model_type")}
    if prefix is None or not isinstance(names, list) or not names or not isinstance(names[0], str):
        return fields
    return {**fields, "architectures": [head_name(names[0], prefix)]}


def head_name(architecture: str, prefix: str) -> str:
    """Returns the architecture of a head whose config.json has its own name, or that of its layer.

    Args:
        architecture: the name.
        prefix: one of `PREFIXES`.
    """
    return architecture if "Eagle" in architecture else prefix + architecture


def _read_speculators(values: Mapping[str, Any], kind: object, where: str) -> dict[str, Any]:
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        known = ", ".join(map(repr, _DEFAULTS))
        raise EngineStartError(f"{where}: {_TYPE} {kind!r} is not supported; supported: {known}")
    layer = values.get(_LAYER)
    if not isinstance(layer, Mapping):
        raise EngineStartError(f"{where}: {_LAYER!r} must be an object, not {layer!r}")
    model_type = layer.get("model_type") or "llama"
    if not isinstance(model_type, str) or model_type not in EAGLE3:
        raise EngineStartError(
            f"{where}: {_LAYER}: model_type {model_type!r} is not supported; supported: "
            f"{', '.join(EAGLE3)}"
        )
    own = {name: value for name, value in values.items() if name not in (_LAYER, "model_type")}
    if kind == "peagle" and own.get("mask_token_id") is None:
        raise EngineStartError(f"{where}: field 'mask_token_id' is missing")
    return {**layer, **_DEFAULTS[kind], **own, "architectures": [EAGLE3[model_type]]}
