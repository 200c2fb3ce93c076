"""ColQwen3.5: Qwen 3.5 and a projection of each token, for late interaction with pages."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3_5
from shmllm.models.families.colqwen3 import with_projection
from shmllm.models.fields import Fields

_WIDTH = 128


def configure(fields: Fields) -> ModelConfig:
    return with_projection(qwen3_5.configure(fields), fields, _WIDTH)
