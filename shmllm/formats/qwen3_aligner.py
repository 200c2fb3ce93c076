"""Qwen3-ForcedAligner as its authors publish it: under the name of Qwen3-ASR, which has an LM head
in the place of its classes of times. This module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARCHITECTURE = "Qwen3ASRForcedAlignerForTokenClassification"
"""vLLM's name for it."""
MODEL_TYPE = "qwen3_forced_aligner"


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of a config.json, with the name of what it describes."""
    thinker = values.get("thinker_config")
    is_aligner = isinstance(thinker, Mapping) and thinker.get("model_type") == MODEL_TYPE
    return {**values, "architectures": [ARCHITECTURE]} if is_aligner else dict(values)
