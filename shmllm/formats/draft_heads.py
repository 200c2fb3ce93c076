"""Reads the configuration of a model that drafts from hidden states (EAGLE, DFlash) in one form,
whoever trained it.

Checkpoints of the library speculators have the fields of the layer in an object of its own, and
others the architecture's name in another order. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shmllm.errors import EngineStartError
from shmllm.formats.pickled_names import pickled_strings
from shmllm.formats.processor_files import read_object
from shmllm.formats.safetensors_header import read_header

EAGLE = {"llama": "EagleLlamaForCausalLM", "qwen2": "EagleQwen2ForCausalLM"}
"""The name of the architecture of EAGLE 1 and 2 by the ``model_type`` of its layer."""
EAGLE3 = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""That of EAGLE-3."""
_PREFIXES = {"eagle": "Eagle", "eagle3": "Eagle3"}
"""By vLLM's names of methods, what it puts before the name of the architecture of a layer."""
_OF_LAYERS = {f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3")}
"""The architectures of layers, whose names SafeAILab's and other heads have."""
_OF_TYPES = {"medusa": "MedusaModel"}
"""The architectures that files may leave out, by their ``model_type``."""
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
_SPECULATORS: dict[str, dict[str, str]] = {
    "eagle3": EAGLE3,
    "peagle": EAGLE3,
    "dflash": {"qwen3": "DFlashDraftModel"},
}
"""By the kinds of heads of that library: the architecture by the ``model_type`` of its layer."""
_DEFAULTS = {"eagle3": {"norm_before_residual": True}}
"""Their fields whose defaults are not those of the others."""


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


def in_terms_of_vllm(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of config.json of such a head as vLLM's classes have it; any other as it
    is.

    Args:
        values: the content.
        directory: where it is, with the tensors that tell a head from a model whose architecture's
            name it has.

    Raises:
        EngineStartError: it is of another kind of head, or a field is no object.
    """
    if (kind := values.get(_TYPE)) is not None:
        return _read_speculators(values, kind, str(directory / "config.json"))
    layer, method = values.get("model"), values.get("method") or "eagle"
    if values.get("model_type") == "eagle" and isinstance(layer, Mapping):
        name, prefix = _first_of(layer), _PREFIXES.get(str(method), "")
        named = name if "Eagle" in name else prefix + name
        values = {**layer, **values, "model": None, "architectures": [named]}
        values["model_type"] = layer.get("model_type")
    name = _first_of(values) or _OF_TYPES.get(str(values.get("model_type")), "")
    if name in _OF_LAYERS:
        name = _prefix_of(directory) + name
    known = _OTHER_NAMES.get(name, name)
    return {**values, "architectures": [known]} if known != _first_of(values) else dict(values)


def _first_of(values: Mapping[str, Any]) -> str:
    """Returns the name of the architecture; "": there is none."""
    names: Any = values.get("architectures")
    is_there = isinstance(names, list) and names and isinstance(names[0], str)
    return names[0] if is_there else ""


def _prefix_of(directory: Path) -> str:
    """Returns what the name of the architecture of a head has before that of its layer, by the
    names of the tensors in its file; "": it is a model, or damaged."""
    try:
        names = read_header(directory / "model.safetensors").names
    except EngineStartError:
        names = pickled_strings(directory / "pytorch_model.bin")
    if "fc.weight" not in names:
        return ""
    is_third = any(name.endswith("hidden_norm.weight") for name in names)
    return _PREFIXES["eagle3" if is_third else "eagle"]


def _read_speculators(values: Mapping[str, Any], kind: object, where: str) -> dict[str, Any]:
    if not isinstance(kind, str) or kind not in _SPECULATORS:
        known = ", ".join(map(repr, _SPECULATORS))
        raise EngineStartError(f"{where}: {_TYPE} {kind!r} is not supported; supported: {known}")
    layer, names = values.get(_LAYER), _SPECULATORS[kind]
    if not isinstance(layer, Mapping):
        raise EngineStartError(f"{where}: {_LAYER!r} must be an object, not {layer!r}")
    model_type = layer.get("model_type") or "llama"
    if not isinstance(model_type, str) or model_type not in names:
        raise EngineStartError(
            f"{where}: {_LAYER}: model_type {model_type!r} is not supported; supported: "
            f"{', '.join(names)}"
        )
    own = {name: value for name, value in values.items() if name not in (_LAYER, "model_type")}
    if kind == "peagle" and own.get("mask_token_id") is None:
        raise EngineStartError(f"{where}: field 'mask_token_id' is missing")
    return {**layer, **_DEFAULTS.get(kind, {}), **own, "architectures": [names[model_type]]}
