"""Llama whose tokens attend both ways: NVIDIA's encoders (NV-EmbedQA, Llama-Embed-Nemotron) and
classifiers of pairs (NV-RerankQA)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.both_ways import attend_both_ways
from shmllm.models.config import ModelConfig, Pooled
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields

_POOLINGS: dict[str, Pooled] = {"avg": "MEAN", "cls": "CLS", "last": "LAST"}


def configure(fields: Fields) -> ModelConfig:
    pooling = fields.meaning("pooling", _POOLINGS, "avg")
    if (temperature := fields.number("temperature", 1.0)) != 1:
        raise fields.error(f"temperature {temperature:g} is not supported; supported: 1")
    model = configure_llama(fields)
    layers = attend_both_ways(model.layers, fields)
    return replace(model, layers=layers, pooling=pooling)
