"""Tele-FLM and FLM-2: Llama with factors of embeddings and logits (Yao et al., 2023, "nanoLM")."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import llama
from shmllm.models.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    model = llama.configure(fields)
    if not fields.flag("use_mup", False):
        return model
    return replace(
        model,
        embedding_scale=fields.number("input_mult", 1.0),
        logits_scale=fields.number("output_mult") / fields.number("mup_scale_factor"),
    )
