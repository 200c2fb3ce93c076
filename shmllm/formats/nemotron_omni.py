"""Nemotron 3 Omni under the names of its publisher, which transformers reads, too. This module must
not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "NemotronHOmniForConditionalGeneration"
"""The family's own name."""
NAMES = ("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3")
"""The architecture's name in transformers, and that in published files."""
_FIELDS = {
    "img_context_token_id": "image_token_id",
    "video_context_token_id": "video_token_id",
    "sound_context_token_id": "audio_token_id",
    "llm_config": "text_config",
    "sound_config": "audio_config",
    "vit_hidden_size": "vision_hidden_size",
}
"""What transformers calls fields of published files."""


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of a config.json with transformers' names; where both are there, its own
    name wins."""
    if values.get("architectures") not in [[name] for name in (NAME, *NAMES)]:
        return dict(values)
    found = {name: value for name, value in values.items() if name not in _FIELDS}
    for theirs, name in _FIELDS.items():
        if found.get(name) is None and values.get(theirs) is not None:
            found[name] = values[theirs]
    audio = found.get("audio_config")
    if isinstance(audio, Mapping) and audio.get("model_type") == "parakeet":
        found["audio_config"] = {**audio, "model_type": "parakeet_encoder"}
    return {**found, "architectures": [NAME]}
