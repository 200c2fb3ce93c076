"""The language models of Mistral's models with images."""

from __future__ import annotations

from collections.abc import Callable

from shmllm.models import ministral3, mistral, mistral4
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields

_FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "mistral": mistral.configure,
    "ministral3": ministral3.configure,
    "mistral4": mistral4.configure,
}


def configure(fields: Fields) -> ModelConfig:
    return _FAMILIES[fields.text("model_type", "mistral")](fields)
