"""CLIP and MetaCLIP 2: vectors of texts and of images that are near to one another where the texts
describe the images. The encoder of texts has causal layers, and a projection of the last token is
the vector (Radford et al., 2021)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import text_fields
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    read_ungated_mlp,
)
from shmllm.models.specs import NormSpec
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.fields import read_clip, vision_fields
from shmllm.models.vision.pooled_specs import PooledTower
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 49_408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
_VISION_MODELS = ("clip_vision_model", "chinese_clip_vision_model", "metaclip_2_vision_model")
_PARTS = ("text_config", "vision_config")
_NAMES = {
    "model.embed_tokens.": "model.embeddings.token_embedding.",
    "model.embed_positions.": "model.embeddings.position_embedding.",
    "model.layers.": "model.encoder.layers.",
    "model.norm.": "model.final_layer_norm.",
    ".o_proj.": ".out_proj.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    fields = first_fields(fields).with_defaults(_DEFAULTS)
    model = read_texts(fields, positions=77, activation="quick_gelu", eps=1e-5)
    return with_projections(model, fields)


def with_projections(model: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns an encoder of texts with a projection to ``projection_dim`` numbers, and CLIP's tower
    for images with another one.

    Args:
        model: the encoder.
        fields: those of ``text_config``.
    """
    width = fields.whole.integer("projection_dim", 512)
    dense = DenseSpec(name="text_projection", inputs=model.hidden_size, outputs=width)
    return replace(
        model,
        head=HeadSpec(kind="projection", steps=(dense,)),
        vision=read_vision(fields),
        skipped_prefixes=("logit_scale",),
    )


def first_fields(fields: Fields) -> Fields:
    """Returns the fields with those of ``text_config_dict`` and ``vision_config_dict`` in the place
    of all of ``text_config`` and ``vision_config``, as transformers reads its first files."""
    whole = fields.whole
    older = {name: whole.table(f"{name}_dict") for name in _PARTS}
    found = {name: values for name, values in older.items() if values}
    return text_fields(whole.with_values(whole.values | found)) if found else fields


def read_texts(fields: Fields, positions: int, activation: str, eps: float) -> ModelConfig:
    """Returns an encoder of texts with causal layers, whose last token is pooled, without a head.

    Args:
        fields: those of ``text_config``.
        positions, activation, eps: the defaults of the number of positions, of the activation and
            of what norms add to the variance.
    """
    plain = {"num_key_value_heads": None, "head_dim": None}  # there are no such fields
    fields = fields.with_values(fields.values | plain)
    layer = LayerSpec(
        mixer=read_attention(fields, bias=True, output_bias=True),
        mlp=read_ungated_mlp(fields, activation=activation, bias=True),
        norms=LayerNorms(before_mixer="layer_norm1", before_mlp="layer_norm2"),
    )
    positions = read_positions(fields, positions)
    return replace(
        read_model(fields, [layer] * read_num_layers(fields), positions, tied=True),
        norm=NormSpec(kind="layer", eps=fields.number("layer_norm_eps", eps), bias=True),
        num_learned_positions=positions,
        lm_head=False,
        pooling="LAST",
        eos_token_ids=(),
    )


def read_vision(fields: Fields) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, *_VISION_MODELS)
    if vision is None:
        return None
    return pooled_vision(read_clip(vision), fields.whole.integer("projection_dim", 512))


def pooled_vision(encoder: EncoderSpec, width: int) -> VisionSpec:
    """Returns what makes a vector of an image, for which one token stands.

    Args:
        encoder: the encoder.
        width: that of the vector.
    """
    tower = PooledTower(encoder=encoder, width=width)
    return VisionSpec(image_token=0, tower=tower, tile_embeddings=1)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
