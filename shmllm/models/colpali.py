"""ColPali: PaliGemma and a projection of each token, for late interaction with pages (Faysse et
al., "ColPali", 2024)."""

from __future__ import annotations

from shmllm.models import paligemma
from shmllm.models.colqwen2 import with_projection
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.paligemma import read_vision

__all__ = ["configure", "read_vision"]


def configure(fields: Fields) -> ModelConfig:
    return with_projection(paligemma.configure(fields), fields)
