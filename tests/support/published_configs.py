"""Small configurations with the fields that models' authors publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shmllm.models.config import ModelConfig

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def read(directory: Path, name: str, **fields: Any) -> ModelConfig:
    """Returns the configuration of an architecture with `SIZES` and further fields."""
    values = SIZES | {"architectures": [name]} | fields
    (directory / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_directory(directory)
