"""MiniCPM-V 4.7: MiniCPM-V 4.6 whose images, slices and the tokens around these have places on
axes. Videos are not taken."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import minicpmv4_6, qwen3_5
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.readers import read_mlp
from shmllm.models.vision.canvas import CanvasMarks
from shmllm.models.vision.fields import read_item_token
from shmllm.models.vision.qwen_fields import with_vision
from shmllm.models.vision.specs import VisionSpec

_MARKS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


def configure(fields: Fields) -> ModelConfig:
    config = qwen3_5.configure_with(fields, read_mlp(fields), num_kv_heads=4)
    vision = read_vision(fields, config.vocab_size)
    return with_vision(config, fields, vision, qwen3_5.SECTIONS, mixes_axes=True)


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = minicpmv4_6.read_vision(fields, vocab_size, "minicpmv4_7_vision")
    if vision is None:
        return None
    check_choice(fields.whole, "uses_mrope_canvas", True)
    for name in _MARKS:
        if fields.whole.values.get(name) is None:
            raise fields.whole.error(f"{name} is missing: images need the token")
    marks = [read_item_token(fields, (name,), 0, vocab_size) for name in _MARKS]
    return replace(vision, has_axes=True, canvas=CanvasMarks(*marks))
