"""ERNIE 1 to 3: BERT that may add an embedding of the task to all tokens (Sun et al., 2019 and
2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import bert
from shmllm.models.fields import Fields
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}

_TASKS = {"model.embed_task_types.": "embeddings.task_type_embeddings."}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS)
    model, tasks = bert.configure(fields), fields.integer("task_type_vocab_size", 3)
    if fields.flag("use_task_id", False):
        return replace(model, num_task_types=tasks)
    skipped = (*model.skipped_prefixes, "embeddings.task_type_embeddings.")
    return replace(model, skipped_prefixes=skipped)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    own = {renamed(name, _TASKS): views for name, views in weights.items()}
    return bert.named_weights(own, config)
