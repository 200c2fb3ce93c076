"""MiniCPM-OCR: MiniCPM-V 4.6 with four times as many embeddings of an image."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import minicpmv4_6, qwen3_5
from shmllm.models.fields import Fields
from shmllm.models.readers import read_mlp
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"


def configure(fields: Fields) -> ModelConfig:
    tied = fields.whole.flag(_TIED, True)  # that of the language model does not count
    fields = fields.with_values(fields.values | {_TIED: tied})
    config = qwen3_5.configure_with(fields, read_mlp(fields), num_kv_heads=4)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return minicpmv4_6.read_vision(fields, vocab_size, "minicpm_ocr_vision", "4x")
