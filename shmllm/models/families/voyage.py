"""Voyage 4 nano: Qwen 3 whose tokens attend both ways, with a projection of each token."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.both_ways import attend_both_ways
from shmllm.models.config import ModelConfig
from shmllm.models.families.qwen3 import configure as configure_qwen3
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.pooled import read_labels


def configure(fields: Fields) -> ModelConfig:
    model = configure_qwen3(fields)
    width = len(read_labels(fields))  # as its code has it
    dense = DenseSpec(name="linear", inputs=model.hidden_size, outputs=width)
    return replace(
        model,
        layers=attend_both_ways(model.layers, fields),
        head=HeadSpec(kind="projection", steps=(dense,)),
        pooling="MEAN",
    )
