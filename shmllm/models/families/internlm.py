"""InternLM 1: Llama with biases in attention. The defaults are those of the models' own
configuration class."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields

_ROTATIONS = ("origin", "dynamic")
"""They are the same up to ``max_position_embeddings``."""


def configure(fields: Fields) -> ModelConfig:
    rotary = Fields(fields.table("rotary"), f"{fields.where}: rotary")
    if (kind := rotary.text("type", "dynamic")) not in _ROTATIONS:
        raise rotary.error(f"type {kind!r} is not supported; supported: {', '.join(_ROTATIONS)}")
    values = {
        "attention_bias": fields.flag("bias", True),
        "rope_theta": rotary.number("base", fields.number("rope_theta", 10_000.0)),
        "num_key_value_heads": None,
    }
    return configure_llama(fields.with_values(fields.values | values))
