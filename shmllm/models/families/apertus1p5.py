"""The language model of Apertus 1.5 (Swiss AI): Apertus whose LM head may have rows for its first
tokens alone, those of text. Images and sounds, which become tokens, are not computed."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import apertus
from shmllm.models.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    model = apertus.configure(fields)
    outputs = fields.optional_integer("output_vocab_size")
    if outputs is None or outputs == model.vocab_size:
        return model
    if outputs > model.vocab_size:
        raise fields.error(f"output_vocab_size ({outputs}) is more than {model.vocab_size} tokens")
    if model.tie_word_embeddings:
        raise fields.error("output_vocab_size is not supported with tie_word_embeddings true")
    return replace(model, num_outputs=outputs)
