"""Reads the configuration of a model that drafts from hidden states (EAGLE-3) in one form, whoever
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

ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""The name of the architecture by the ``model_type`` of its layer."""
_OTHER_NAMES = {
    "LlamaForCausalLMEagle3": "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM": "Eagle3LlamaForCausalLM",
}
_TYPE, _LAYER = "speculators_model_type", "transformer_layer_config"
_DEFAULTS = {"norm_before_residual": True}


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
    """Returns the content of config.json of an EAGLE-3 head as vLLM's classes have it; any other as
    it is.

    Args:
        values: the content.
        where: its name in messages.

    Raises:
        EngineStartError: it is of another kind of head, or a field is no object.
    """
    if (kind := values.get(_TYPE)) is not None:
        return _read_speculators(values, kind, where)
    names = values.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if isinstance(first, str) and first in _OTHER_NAMES:
        return {**values, "architectures": [_OTHER_NAMES[first]]}
    return dict(values)


def _read_speculators(values: Mapping[str, Any], kind: object, where: str) -> dict[str, Any]:
    if kind != "eagle3":
        raise EngineStartError(f"{where}: {_TYPE} {kind!r} is not supported; supported: 'eagle3'")
    layer = values.get(_LAYER)
    if not isinstance(layer, Mapping):
        raise EngineStartError(f"{where}: {_LAYER!r} must be an object, not {layer!r}")
    model_type = layer.get("model_type") or "llama"
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise EngineStartError(
            f"{where}: {_LAYER}: model_type {model_type!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    own = {name: value for name, value in values.items() if name not in (_LAYER, "model_type")}
    return {**layer, **_DEFAULTS, **own, "architectures": [ARCHITECTURES[model_type]]}
