"""Families that transformers has no classes of, as what they are: other families of transformers
under other names. Their repositories bring code of their own."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    config_class = MiMoConfig


class MiniCPMConfig(GraniteConfig):  # type: ignore[misc]
    """Granite whose factors follow from MiniCPM's fields."""

    model_type = "minicpm"

    scale_emb: float = 1.0
    scale_depth: float = 1.0
    dim_model_base: int = 1
    tie_word_embeddings: bool = True

    def __post_init__(self, **options: Any) -> None:
        super().__post_init__(**options)
        self.embedding_multiplier = self.scale_emb
        self.attention_multiplier = (self.hidden_size / self.num_attention_heads) ** -0.5
        self.residual_multiplier = self.scale_depth / self.num_hidden_layers**0.5
        self.logits_scaling = self.hidden_size / self.dim_model_base


class MiniCPMForCausalLM(GraniteForCausalLM):  # type: ignore[misc]
    config_class = MiniCPMConfig


for _config, _model in ((MiMoConfig, MiMoForCausalLM), (MiniCPMConfig, MiniCPMForCausalLM)):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)
