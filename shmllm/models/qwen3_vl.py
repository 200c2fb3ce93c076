"""The language model of Qwen 3 VL: Qwen 3 with other defaults.

Its positions are triples, of time, height and width. Those of text are three equal numbers, so that
``mrope_section``, which distributes them over the pairs, changes nothing.
"""

from __future__ import annotations

from shmllm.models import qwen3
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields

_DEFAULTS = {"max_position_embeddings": 128000, "rope_theta": 500000.0}


def configure(fields: Fields) -> ModelConfig:
    given = {name: value for name, value in fields.values.items() if value is not None}
    return qwen3.configure(Fields(_DEFAULTS | given, fields.where))
