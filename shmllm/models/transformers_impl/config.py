"""The `ModelConfig` of a module of transformers: what the KV cache and the reports read.

Sizes come from the module itself, as a probe saw them. This module must not know families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import eos_token_ids
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.specs import NormSpec
from shmllm.models.transformers_impl.module import refusal
from shmllm.models.transformers_impl.probe import Findings

_GROWING = ("dynamic", "longrope")
"""The rotations whose angles for all tokens of a step depend on its longest request."""


def find_length(config: Any, directory: Path, wanted: int | None) -> int:
    """Returns the largest number of tokens of a request.

    Args:
        config: transformers' configuration.
        directory: the model's directory.
        wanted: the option max_model_len; None: all positions of the model.

    Raises:
        EngineStartError: the configuration says no length and nobody else does, or angles depend on
            the longest request of a step.
    """
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None) or wanted
    if not isinstance(length, int) or length < 1:
        raise refusal(directory, "it has no max_position_embeddings: say max_model_len")
    for rope in _ropes(text):
        original = rope.get("original_max_position_embeddings") or length
        if rope.get("rope_type") in _GROWING and (wanted or length) > original:
            raise refusal(
                directory,
                "its angles depend on the longest request of a step if requests may have more than "
                f"{original:,} tokens: start with max_model_len={original}",
            )
    return max(length, _stretched(text))


def _stretched(text: Any) -> int:
    """Returns to how many positions yarn stretches the rotations; 0: to none."""
    found = (rope for rope in _ropes(text) if rope.get("rope_type") == "yarn")
    pairs = ((each.get("original_max_position_embeddings"), each.get("factor")) for each in found)
    return min((int((length or 0) * (factor or 0)) for length, factor in pairs), default=0)


def describe(module: Any, findings: Findings, directory: Path, length: int) -> ModelConfig:
    """Returns the configuration of a module.

    Args:
        module: the module.
        findings: what a probe of it found.
        directory: the model's directory, whose generation_config.json is read.
        length: the number of its positions.

    Raises:
        EngineStartError: generation_config.json is damaged.
    """
    text = module.config.get_text_config()
    path = Path(directory) / "config.json"
    found = (getattr(each, "eos_token_id", None) for each in (module.config, text))
    eos = next((each for each in found if each is not None), None)
    fields = Fields({"eos_token_id": eos}, str(path))
    return ModelConfig(
        architecture=type(module).__name__,
        vocab_size=findings.vocab_size,
        hidden_size=findings.hidden_size,
        max_position_embeddings=length,
        layers=tuple(
            LayerSpec(mixer=spec, mlp=None, norms=LayerNorms()) for spec in findings.layers.specs
        ),
        norm=NormSpec(),
        tie_word_embeddings=bool(getattr(module.config, "tie_word_embeddings", False)),
        eos_token_ids=eos_token_ids(fields, Path(directory) / "generation_config.json"),
    )


def _ropes(text: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the parameters of all rotations: of all layers, or of each type of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    for each in (found, *found.values()):
        if isinstance(each, Mapping):
            yield each
