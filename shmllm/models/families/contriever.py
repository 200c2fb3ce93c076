"""Contriever: BERT whose vectors are means (Izacard et al., 2022)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import configure as configure_bert
from shmllm.models.families.bert import named_weights
from shmllm.models.fields import Fields

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    return replace(configure_bert(fields), pooling="MEAN")
