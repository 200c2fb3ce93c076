"""Llama 4: layers that rotate attend within chunks, with norms of queries and keys; every fourth
layer attends to all positions, without rotation, with queries that grow. The weights of experts
multiply what these read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec, Growth
from shmllm.models.quantization_methods import quantization_fields
from shmllm.models.readers import (
    FULL,
    read_activation,
    read_attention,
    read_experts,
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_factor,
    read_item_token,
    read_num_heads,
    read_side,
    read_theta,
    vision_fields,
)
from shmllm.models.vision.projected_specs import Llama4Tower
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.weight_names import renamed
from shmllm_kernels.windows import Chunk

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_CHUNKED = "chunked_attention"
_ONLY_IN_VISION: dict[str, str | float] = {
    "hidden_act": "gelu",
    "multi_modal_projector_bias": False,
    "norm_eps": 1e-5,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
"""Fields of ``vision_config`` that transformers does not read, and what they must say."""
_NAMES = {".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."}


def configure(fields: Fields) -> ModelConfig:
    attentions = _read_attentions(fields)
    sparse, experts = _read_moe_layers(fields, len(attentions)), _read_experts(fields)
    dense = MLPSpec(
        inner=fields.integer("intermediate_size_mlp", 16_384), activation=read_activation(fields)
    )
    layers = [
        LayerSpec(mixer=attention, mlp=experts if index in sparse else dense)
        for index, attention in enumerate(attentions)
    ]
    model = read_model(fields, layers, _positions(fields))
    vision = read_vision(fields, model.vocab_size)
    return replace(model, norm=read_norm(fields, default=1e-5), vision=vision)


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "llama4_vision_model")
    if vision is None:
        return None
    for name, supported in _ONLY_IN_VISION.items():
        check_choice(vision, name, supported)
    encoder = _read_encoder(vision)
    factor = read_factor(vision, "pixel_shuffle_ratio", encoder.side)
    adapted = vision.integer("projector_output_dim", 4096)
    widths = {
        "intermediate_size": (encoder.inner, factor**2 * encoder.hidden_size),
        "projector_input_dim": (vision.integer("projector_input_dim", 4096), adapted),
        "vision_output_dim": (vision.integer("vision_output_dim", 7680), adapted),
    }
    for name, (found, wanted) in widths.items():
        if found != wanted:
            raise vision.error(f"{name} {found} does not fit the widths around it, {wanted} does")
    return VisionSpec(
        image_token=read_item_token(
            fields, ("image_token_index", "image_token_id"), 200_092, vocab_size
        ),
        tower=Llama4Tower(
            encoder=encoder, theta=read_theta(vision), factor=factor, adapted=adapted
        ),
        tile_embeddings=(encoder.side // factor) ** 2,
    )


def _read_encoder(vision: Fields) -> EncoderSpec:
    hidden_size = vision.integer("hidden_size", 768)
    num_heads = read_num_heads(vision, "num_attention_heads", 16, hidden_size)
    check_rotated_heads(vision, hidden_size // num_heads)
    image_size = read_side(vision, "image_size", 448)
    patch_size = read_side(vision, "patch_size", 14)
    if patch_size > image_size:
        raise vision.error(f"patch_size ({patch_size}) exceeds image_size ({image_size})")
    return EncoderSpec(
        kind="llama4",
        hidden_size=hidden_size,
        num_layers=vision.integer("num_hidden_layers", 34, maximum=MOST_LAYERS),
        num_heads=num_heads,
        inner=vision.integer("intermediate_size", 5632),
        image_size=image_size,
        patch_size=patch_size,
        activation="gelu",
        eps=1e-5,
    )


def _positions(fields: Fields) -> int:
    return read_positions(fields, 131_072)


def _read_attentions(fields: Fields) -> list[AttentionSpec]:
    bias = fields.flag("attention_bias", False)
    plain = read_attention(fields, num_kv_heads=8, head_dim=128, bias=bias, output_bias=bias)
    rope = RopeConfig.from_fields(
        fields, _positions(fields), plain.head_dim, theta=500_000.0, interleaved=True
    )
    rotated = replace(plain, rope=rope)
    if fields.flag("use_qk_norm", True):
        rotated = replace(rotated, qk_norm="head", norms_rotated=True, norms_have_weights=False)
    grown = replace(plain, growth=_read_growth(fields))
    num_layers = read_num_layers(fields)
    rotates = _read_rotating(fields, num_layers)
    size = _read_chunk(fields)
    types = read_layer_types(fields, num_layers, (FULL, _CHUNKED))
    if types is None:
        types = tuple(_CHUNKED if each and size is not None else FULL for each in rotates)
    if _CHUNKED in types and size is None:
        raise fields.error(f"'layer_types' has {_CHUNKED} but attention_chunk_size is null")
    window = None if size is None else Chunk(size)
    return [
        replace(rotated if rotates_here else grown, window=None if kind == FULL else window)
        for rotates_here, kind in zip(rotates, types, strict=True)
    ]


def _read_growth(fields: Fields) -> Growth | None:
    tuning: Any = fields.values.get("attn_temperature_tuning", True)
    if type(tuning) not in (bool, int):  # the first files have a number
        raise fields.error(f"'attn_temperature_tuning' must be a boolean, not {tuning!r}")
    if not tuning:
        return None
    rate, length = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    return Growth(rate, length, offset=1)


def _read_chunk(fields: Fields) -> int | None:
    """Returns ``attention_chunk_size``, which null switches off."""
    name = "attention_chunk_size"
    return fields.optional_integer(name) if name in fields.values else 8192


def _read_rotating(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Returns which layers rotate: those that ``no_rope_layers`` has a one for."""
    listed: Any = fields.values.get("no_rope_layers")
    if not listed:
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    is_list = isinstance(listed, list) and len(listed) >= num_layers
    if not is_list or any(each not in (0, 1) for each in listed):
        raise fields.error(f"'no_rope_layers' must have a 0 or 1 for each of {num_layers} layers")
    return tuple(map(bool, listed[:num_layers]))


def _read_moe_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Returns the layers that have experts."""
    listed: Any = fields.values.get("moe_layers")
    if listed is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, num_layers, step))
    if not isinstance(listed, list) or any(type(each) is not int for each in listed):
        raise fields.error("'moe_layers' must list the numbers of layers")
    return frozenset(listed)


def _read_experts(fields: Fields) -> MoESpec:
    """Returns the experts; quantized checkpoints have tensors for each."""
    inner = fields.integer("intermediate_size", 8192)
    return replace(
        read_experts(fields, inner, num_experts=16, top_k=1),
        scoring="sigmoid",
        weighs_inputs=True,
        whole=quantization_fields(fields) is None,
        transposed=True,
        shared=MLPSpec(inner=inner),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


module_weights = named_weights
