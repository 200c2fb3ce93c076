"""EuroBERT: Llama whose tokens attend both ways (Boizard et al., 2025)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.both_ways import attend_both_ways
from shmllm.models.config import ModelConfig, Pooled
from shmllm.models.config_file import architecture_name
from shmllm.models.families.bert import with_labels
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.registry import Purpose, purpose_of

_POOLINGS: dict[str, Pooled] = {"bos": "CLS", "mean": "MEAN", "late": "MEAN"}
"""What a classifier reads; with "late", a mean is one of its results for each token."""
_DEFAULTS = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


def configure(fields: Fields) -> ModelConfig:
    model = configure_llama(fields.with_defaults(_DEFAULTS))
    head, pooling = _read_head(fields)
    layers = attend_both_ways(model.layers, fields)
    return replace(model, layers=layers, head=head, pooling=pooling)


def _read_head(fields: Fields) -> tuple[HeadSpec | None, Pooled]:
    """Returns the classifier, if there is one, and what it reads."""
    purpose = purpose_of(architecture_name(fields))
    if purpose is Purpose.CLASSIFY_TOKENS:
        return with_labels(fields), "CLS"
    if purpose is not Purpose.CLASSIFY:
        return None, "CLS"
    pooling = fields.meaning("classifier_pooling", _POOLINGS, "late")
    width = fields.integer("hidden_size")
    dense = DenseSpec(name="dense", inputs=width, outputs=width, bias=True, activation="gelu")
    is_late = fields.text("classifier_pooling", "late") == "late"
    return replace(with_labels(fields, dense), precedes_means=is_late), pooling
