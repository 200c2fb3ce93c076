"""Qianfan-OCR: InternVL's encoder under the names that InternVL's authors give to weights, and
Qwen 3."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import internvl, llava
from shmllm.models.fields import Fields
from shmllm.models.vision.projected_specs import InternVLTower
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"


def configure(fields: Fields) -> ModelConfig:
    tied = fields.whole.flag(_TIED, False)  # that of the language model does not count
    config = llava.read_text_model(fields.with_values(fields.values | {_TIED: tied}), "qwen3")
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    found = internvl.read_vision(fields, vocab_size, ("qianfan_ocr_vision",), attention_bias=True)
    if found is None:
        return None
    assert isinstance(found.tower, InternVLTower)
    if found.tower.qk_norm:  # whose names in checkpoints are not known
        raise fields.whole.error("vision_config: use_qk_norm true is not supported")
    return replace(found, tower=replace(found.tower, is_published=True, has_modules=True))
