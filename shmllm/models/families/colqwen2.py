"""ColQwen2: Qwen 2 VL and a projection of each token, for late interaction with pages (Faysse et
al., "ColPali", 2024).

Positions of images are triples, as in the authors' code, which trained it.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2_vl
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.vision.specs import VisionSpec


def configure(fields: Fields) -> ModelConfig:
    model = qwen2_vl.configure(fields)
    return with_projection(replace(model, vision=read_vision(fields, model)), fields)


def with_projection(model: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the model with a projection of each token to ``embedding_dim`` numbers."""
    dense = DenseSpec(
        name="embedding_proj_layer",
        inputs=model.hidden_size,
        outputs=fields.whole.integer("embedding_dim", 128),
        bias=True,
    )
    return replace(model, head=HeadSpec(kind="projection", steps=(dense,)))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``. Videos are not
    taken."""
    found = qwen2_vl.read_vision(fields, config)
    return found and replace(found, video=None)
