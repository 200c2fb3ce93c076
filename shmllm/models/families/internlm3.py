"""InternLM 3: Llama under other names of the fields that decide on biases."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields

_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}


def configure(fields: Fields) -> ModelConfig:
    bias, of_inputs = fields.flag("bias", False), fields.flag("qkv_bias", False)
    biases = {"attention_bias": of_inputs, "mlp_bias": bias}
    fields = fields.with_absent({**_DEFAULTS, **biases})
    if fields.flag("attention_bias", False) != fields.flag("mlp_bias", False):
        raise fields.error("qkv_bias that differs from bias is not supported")
    return configure_llama(fields)
