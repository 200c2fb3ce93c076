"""Muse Glimmer: attention with gates, in windows, and in every fourth layer over all positions
without rotation; norms of (1 + weight) before and behind attention and MLP; logits with a factor
and a cap. Embeddings of tokens and of images have a norm without weights.

Its tower attends within windows in three of four layers. Positions count on through images, and
each frame of a video is behind its time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.families.gemma3 import NORMS
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_activation,
    read_attention,
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
)
from shmllm.models.specs import MLPSpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_item_token,
    read_num_heads,
    read_theta,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.qwen_fields import ItemTokens, read_video
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import MuseGlimmerTower
from shmllm.models.weight_names import TABLE

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_WINDOWED = "window_attention"
_PERIOD = 4
_TOKENS = ItemTokens(200_092, 200_091)
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    norm, behind = read_norm(fields, default=1e-5), fields.number("post_norm_eps", 1e-8)
    mlp = MLPSpec(
        inner=fields.integer("intermediate_size"),
        activation=read_activation(fields, "hidden_activation"),
    )
    norms = replace(NORMS, eps_behind=(behind, behind))
    layers = [LayerSpec(mixer=mixer, mlp=mlp, norms=norms) for mixer in _read_mixers(fields)]
    config = replace(
        read_model(fields, layers, read_positions(fields, 131_072)),
        norm=replace(norm, offset=1.0),
        last_norm=norm,
        logits_scale=fields.number("output_multiplier", 0.196_116_135_138_184_04),
        logits_cap=fields.number("final_logit_softcapping", 20.0),
    )
    if config.tie_word_embeddings or fields.whole.flag("tie_word_embeddings", False):
        raise fields.error("tie_word_embeddings true is not supported: embeddings have a norm")
    return replace(config, vision=read_vision(fields, config))


def _read_mixers(fields: Fields) -> list[AttentionSpec]:
    check_choice(fields, "attention_bias", False)
    num_layers = read_num_layers(fields)
    attention = read_attention(fields, num_kv_heads=2, head_dim=128)
    attention = replace(
        attention,
        scale=attention.scale * fields.number("qk_scale_factor", 3.87),
        qk_norm="head",
        norms_have_weights=False,
        gated=True,
        gates_apart=True,
    )
    rotated = with_rope(attention, fields, read_positions(fields, 131_072))
    types = read_layer_types(fields, num_layers) or tuple(
        SLIDING if behind % _PERIOD else FULL for behind in reversed(range(num_layers))
    )
    windows = windows_by_type(fields, types, read_window(fields, 2048))
    rotates = _read_rotated(fields, num_layers, rotated)
    return [
        replace(rotated if is_rotated else attention, window=window)
        for is_rotated, window in zip(rotates, windows, strict=True)
    ]


def _read_rotated(fields: Fields, num_layers: int, rotated: AttentionSpec) -> list[bool]:
    """Returns for each layer whether it rotates queries and keys: whether ``layer_rope_theta`` has
    the base of the wavelengths for it, and not 0."""
    thetas: Any = fields.values.get("layer_rope_theta")
    if thetas is None:
        return [behind % _PERIOD != 0 for behind in reversed(range(num_layers))]
    assert rotated.rope is not None, "it rotates"
    theta = rotated.rope.theta
    if not isinstance(thetas, list) or len(thetas) != num_layers:
        raise fields.error(f"'layer_rope_theta' must have a number for each of {num_layers} layers")
    for each in thetas:
        if type(each) not in (int, float) or each not in (0, theta):
            known = f"0 and rope_theta, {theta:g}"
            raise fields.error(f"layer_rope_theta {each!r} is not supported; supported: {known}")
    return [each != 0 for each in thetas]


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        config: that of the language model.
    """
    vision = vision_fields(fields, "muse_glimmer_vision")
    if vision is None:
        return None
    assert config.last_norm is not None, "its language model has one"
    tower = _read_tower(vision, fields.whole, config.last_norm.eps)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), _TOKENS.image, config.vocab_size),
        tower=tower,
        merge_size=tower.merge_size,
        video=read_video(
            fields,
            ("MuseGlimmerVideoProcessor",),
            config.vocab_size,
            in_one_piece=False,
            tokens=_TOKENS,
        ),
    )


def _read_tower(vision: Fields, whole: Fields, eps: float) -> MuseGlimmerTower:
    width, merge = vision.integer("hidden_size", 1536), vision.integer("merge_size", 2)
    if (out := whole.integer("out_hidden_size", 6144)) != width * merge**2:
        raise whole.error(f"out_hidden_size ({out}) is not that of {merge**2} patches of {width}")
    num_heads = read_num_heads(vision, "num_attention_heads", 16, width)
    check_rotated_heads(vision, width // num_heads)
    side = vision.integer("pos_emb_height", 32)
    if (columns := vision.integer("pos_emb_width", 32)) != side:
        raise vision.error(f"pos_emb_width ({columns}) differs from pos_emb_height ({side})")
    if side % merge:
        raise vision.error(f"pos_emb_height ({side}) must be a multiple of merge_size ({merge})")
    num_layers = vision.integer("num_hidden_layers", 50, maximum=MOST_LAYERS)
    types = read_layer_types(vision, num_layers, (FULL, _WINDOWED)) or tuple(
        _WINDOWED if layer % _PERIOD and layer != num_layers else FULL
        for layer in range(1, num_layers + 1)
    )
    return MuseGlimmerTower(
        hidden_size=width,
        num_layers=num_layers,
        num_heads=num_heads,
        inner=vision.integer("intermediate_size", 8960),
        patch_size=vision.integer("patch_size", 14),
        merge_size=merge,
        num_frames=vision.integer("patch_temporal", 2),
        activation=read_vision_activation(vision, "hidden_act", "gelu"),
        theta=read_theta(vision),
        table_side=side,
        full_layers=tuple(layer for layer, kind in enumerate(types) if kind == FULL),
        eps=vision.number("layer_norm_eps", 1e-5),
        adapted=whole.integer("projector_hidden_size", 4096),
        adapter_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
        last_eps=eps,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.arranged import NormedRows

    assert config.last_norm is not None, "the family has one"
    eps = config.last_norm.eps
    return weights | {TABLE: tuple(NormedRows(view, eps) for view in weights[TABLE])}
