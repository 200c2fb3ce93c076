"""ColPali: PaliGemma and a projection of each token, for late interaction with pages (Faysse et
al., "ColPali", 2024)."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families import paligemma
from shmllm.models.families.colqwen2 import with_projection
from shmllm.models.families.paligemma import read_vision
from shmllm.models.fields import Fields

__all__ = ["configure", "read_vision"]


def configure(fields: Fields) -> ModelConfig:
    return with_projection(paligemma.configure(fields), fields)
