"""ColBERT: BERT with a projection of each token, for late interaction (Khattab and Zaharia, 2020),
as its authors' code writes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shmllm.models.bert import configure as configure_bert
from shmllm.models.bert import named_weights
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.sentence_files import read_colbert_metadata

__all__ = ["configure", "named_weights"]


def configure(fields: Fields) -> ModelConfig:
    model = configure_bert(fields)
    width = read_colbert_metadata(Path(fields.where).parent).integer("dim", 128)
    dense = DenseSpec(name="linear", inputs=model.hidden_size, outputs=width)
    return replace(model, head=HeadSpec(kind="projection", steps=(dense,)))
