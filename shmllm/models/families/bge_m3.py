"""BGE-M3: XLM-RoBERTa with a projection of each token for late interaction, and one to its weight
in a comparison of words (Chen et al., 2024). Both are in files beside the checkpoint."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import roberta
from shmllm.models.families.roberta import named_weights
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec

__all__ = ["configure", "named_weights"]

VECTORS, WEIGHTS = "colbert_linear", "sparse_linear"


def configure(fields: Fields) -> ModelConfig:
    model = roberta.configure(fields)
    width = model.hidden_size
    both = DenseSpec(
        name="",
        inputs=width,
        outputs=width + 1,
        bias=True,
        parts=((VECTORS, width), (WEIGHTS, 1)),
    )
    return replace(
        model,
        head=HeadSpec(kind="multi", steps=(both,), activation="relu"),
        extra_files=(VECTORS, WEIGHTS),
    )
