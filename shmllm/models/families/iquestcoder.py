"""IQuest-Coder V1: Llama with defaults of its own."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields

_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_REFUSED = "clip_qkv", "use_sliding_window"


def configure(fields: Fields) -> ModelConfig:
    for name in _REFUSED:
        if fields.values.get(name):
            raise fields.error(f"{name} {fields.values[name]!r} is not supported")
    return configure_llama(fields.with_absent(_DEFAULTS))
