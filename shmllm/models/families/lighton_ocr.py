"""LightOnOCR: Pixtral's tower, projections of squares of patches, and Qwen 3.

Images may have a row or a column of patches that is in no square. The tower computes it, and no
embedding stands for it.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import llava, mistral3
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"
_OF_THE_PROJECTOR = {
    "vision_feature_layer": -1,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
}
"""Fields of Mistral 3 that published files have, too, and the only values of each."""


def configure(fields: Fields) -> ModelConfig:
    tied = fields.whole.flag(_TIED, True)  # that of the language model does not count
    config = llava.read_text_model(fields.with_values(fields.values | {_TIED: tied}), "qwen3")
    return replace(config, vision=read_vision(fields, config))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    whole = fields.whole
    for name, value in _OF_THE_PROJECTOR.items():
        if (found := whole.values.get(name)) not in (None, value):
            raise whole.error(f"{name} {found!r} is not supported; supported: {value!r}")
    token = read_item_token(
        fields, ("image_token_id", "image_token_index"), 151_655, config.vocab_size
    )
    tower = mistral3.read_tower(fields, whole, config.norm.eps)
    if tower is None:
        return None
    tower = replace(tower, leaves_rest=True)
    return VisionSpec(image_token=token, tower=tower, merge_size=tower.merge_size)
