"""The table of architectures, with the default values that their config.json may omit.

This module must not import torch: `create.create_model` imports an architecture's class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmllm.errors import EngineStartError

WindowRule = Literal["none", "every_layer", "by_layer_type"]
"""Which layers a sliding window applies to."""

BiasRule = Literal["none", "always", "configured"]
"""Whether q, k and v have a bias: never, always, or if the field ``attention_bias`` is true."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: its class, and transformers' defaults for fields that are absent.

    Attributes:
        target: "module:Class", a subclass of DecoderModel.
        num_kv_heads: the default of ``num_key_value_heads``; None: num_heads.
        head_dim: the default of ``head_dim``; None: hidden_size / num_heads.
        max_position_embeddings: the default of that field.
        window: which layers ``sliding_window`` applies to.
        attention_bias: whether q, k and v have a bias.
        mlp_bias: True if the field ``mlp_bias`` decides whether the MLP has biases; False if it
            never has any.
    """

    target: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    window: WindowRule = "none"
    attention_bias: BiasRule = "none"
    mlp_bias: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "shmllm.models.llama:LlamaForCausalLM", attention_bias="configured", mlp_bias=True
    ),
    "MistralForCausalLM": Architecture(
        "shmllm.models.mistral:MistralForCausalLM",
        num_kv_heads=8,
        max_position_embeddings=131072,
        window="every_layer",
    ),
    "Qwen2ForCausalLM": Architecture(
        "shmllm.models.qwen2:Qwen2ForCausalLM",
        num_kv_heads=32,
        max_position_embeddings=32768,
        window="by_layer_type",
        attention_bias="always",
    ),
    "Qwen3ForCausalLM": Architecture(
        "shmllm.models.qwen3:Qwen3ForCausalLM",
        num_kv_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
        window="by_layer_type",
        attention_bias="configured",
    ),
}


def find_architecture(name: str) -> Architecture:
    """Returns the entry of ``name``.

    Raises:
        EngineStartError: the architecture is unknown; the message lists the known ones.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise EngineStartError(f"unknown architecture {name!r}; supported: {known}") from None
