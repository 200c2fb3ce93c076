"""The fields of config.json that only encoders have, from the metadata of a GGUF file: more of
`family_fields`.

A type is a function and a line in OF_ENCODERS, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmllm.formats.gguf import shown
from shmllm.formats.gguf_encoder_families import CLASSIFIER, POOLER
from shmllm.frontend.gguf.family_fields import WINDOW, Json, gemma3
from shmllm.frontend.gguf.metadata import Metadata

_LABELS = "classifier.output_labels"


def _num_token_types(known: Metadata) -> int:
    """The number of types of tokens, of which tensors have the embeddings."""
    table = known.header.tensors.get("token_types.weight")
    if table is None:
        raise known.header.error("no matrix token_types.weight")
    return table.shape[0]


def _bert(known: Metadata, config: Json) -> Json:
    """Files have the positions of RoBERTa without those before the first token's, so that they are
    BERT's. A classifier reads the first token through a projection, if the file has it."""
    fields: Json = {"hidden_act": "gelu", "type_vocab_size": _num_token_types(known)}
    pooler, last = (known.header.tensors.get(f"{name}.weight") for name in (POOLER, CLASSIFIER))
    if pooler is None and last is None:
        return fields
    if pooler is None or last is None:
        raise known.header.error(
            "a classifier without the projection before it, which llama.cpp's conversion of BERT "
            "leaves out; take the safetensors of this model"
        )
    architectures = ["BertForSequenceClassification"]
    return {**fields, "architectures": architectures, **_labels(known, last.shape[0])}


def _labels(known: Metadata, count: int) -> Json:
    names: Any = known.find(_LABELS)
    if names is None:
        return {"num_labels": count}
    if not isinstance(names, list) or len(names) != count:
        raise known.header.error(f"{_LABELS} must have {count} names, found {shown(names)}")
    return {"id2label": {str(index): str(name) for index, name in enumerate(names)}}


def _nomic_bert(known: Metadata, config: Json) -> Json:
    return {"hidden_act": "silu", "type_vocab_size": _num_token_types(known)}


def _embedding_gemma(known: Metadata, config: Json) -> Json:
    """A window counts the positions on both sides."""
    both_ways = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    return gemma3(known, config) | both_ways


def _jina_bert(known: Metadata, config: Json) -> Json:
    return {
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "type_vocab_size": _num_token_types(known),
    }


def _modernbert(known: Metadata, config: Json) -> Json:
    if f"{CLASSIFIER}.weight" in known.header.tensors:
        raise known.header.error("a classifier of ModernBERT is not supported as GGUF")
    period, theta = "attention.sliding_window_pattern", config["rope_theta"]
    return {
        "hidden_activation": known.find("hidden_activation") or "gelu",
        "local_attention": known.whole(WINDOW),
        "global_attn_every_n_layers": known.whole(period, 3),
        "rope_theta": None,
        "global_rope_theta": theta,
        "local_rope_theta": known.number("rope.freq_base_swa", theta),
    }


OF_ENCODERS: dict[str, Callable[[Metadata, Json], Json]] = {
    "bert": _bert,
    "nomic_bert": _nomic_bert,
    "gemma_embedding": _embedding_gemma,
    "jina_bert": _jina_bert,
    "modernbert": _modernbert,
}
"""By the model's type."""
