"""ColBERT: an encoder with a projection of each token, for late interaction (Khattab and Zaharia,
2020), as its authors' code writes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families import bert, jina_bert, jina_embeddings_v3
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.sentence_files import read_colbert_metadata

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_READERS = {
    ("bert", "absolute"): bert.configure,
    ("bert", "alibi"): jina_bert.configure,
    ("xlm-roberta", "rotary"): jina_embeddings_v3.configure,
}
"""Who reads an encoder, by its ``model_type`` and its ``position_embedding_type``."""


def configure(fields: Fields) -> ModelConfig:
    kind = fields.text("model_type"), fields.text("position_embedding_type", "absolute")
    if kind not in _READERS:
        known = ", ".join(" ".join(each) for each in _READERS)
        raise fields.error(
            f"HF_ColBERT with model_type {kind[0]!r} and position_embedding_type {kind[1]!r} is "
            f"not supported; supported: {known}"
        )
    model = _READERS[kind](fields)
    width = read_colbert_metadata(Path(fields.where).parent).integer("dim", 128)
    dense = DenseSpec(name="linear", inputs=model.hidden_size, outputs=width)
    return replace(model, head=HeadSpec(kind="projection", steps=(dense,)))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    mixer = config.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    if mixer.rope is not None:
        return jina_embeddings_v3.named_weights(weights, config)
    if mixer.biases is not None:
        return jina_bert.named_weights(weights, config)
    return bert.named_weights(weights, config)
