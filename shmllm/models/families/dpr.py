"""The encoders of DPR, for questions and for passages: BERT (Karpukhin et al., 2020)."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import configure as configure_bert
from shmllm.models.families.bert import named_weights
from shmllm.models.fields import Fields

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    if (width := fields.integer("projection_dim", 0, minimum=0)) != 0:
        raise fields.error(f"projection_dim {width} is not supported; supported: 0")
    return configure_bert(fields)
