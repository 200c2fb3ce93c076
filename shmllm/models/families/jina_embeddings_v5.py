"""Jina Embeddings v5: Qwen 3, or EuroBERT, with an adapter for each task beside the weights. The
formulas are those of the code in its authors' files (modeling_jina_embeddings_v5.py)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import eurobert, qwen3
from shmllm.models.fields import Fields
from shmllm.models.quantization_methods import quantization_fields
from shmllm.models.task_adapters import read_task_directory


def configure(fields: Fields) -> ModelConfig:
    if quantization_fields(fields) is not None:
        raise fields.error("quantized checkpoints with adapters for tasks are not supported")
    family = qwen3 if fields.flag("is_decoder", True) else eurobert
    model: ModelConfig = family.configure(fields)
    return replace(model, pooling="LAST", task_adapters=read_task_directory(fields))
