"""ERNIE 4.5 VL: an encoder for images of any size, and ERNIE 4.5 whose tokens of images, and the
marks around them, have experts of their own.

Its positions are triples, see `qwen2_5_vl`. Its videos, on whose frames transformers draws times in
a font of the checkpoint, are refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.combined_specs import ExpertsByTokensSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import ernie4_5_moe
from shmllm.models.families.ernie4_5 import ernie_model, read_ernie_attention
from shmllm.models.families.ernie4_5_moe import read_ernie_experts
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.readers import DENSE, SPARSE, read_mlp, read_mlp_types, read_num_layers
from shmllm.models.specs import MoESpec, TokenKind
from shmllm.models.vision.ernie4_5_vl_specs import NUM_FRAMES, Ernie45VLTower
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.qwen_fields import read_qwen_tower, with_vision
from shmllm.models.vision.specs import VisionSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 103_424,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
}
_INNER = [1536, 512]
_SECTIONS = (22, 22, 20)
_IMAGE_TOKEN = 100_295
_TOKENS = {
    "image_start_token_id": 101_304,
    "image_end_token_id": 101_305,
    "image_token_id": _IMAGE_TOKEN,
    "video_start_token_id": 101_306,
    "video_end_token_id": 101_307,
    "video_token_id": 103_367,
}
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
}
_TIED = "tie_word_embeddings"
_BIAS = ".gate.e_score_correction_bias"
_BIASES = ".moe_statics.e_score_correction_bias"
_SECOND = ".second"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("use_bias", False):
        raise fields.error("'use_bias' is not supported; supported: false")
    given = {_TIED: fields.whole.flag(_TIED, True)}  # that of the language model does not count
    fields = fields.with_values(fields.values | given).with_absent(_DEFAULTS)
    hidden, num_heads = (fields.integer(each) for each in ("hidden_size", "num_attention_heads"))
    fields = fields.with_absent({"head_dim": hidden // num_heads})
    num_layers = read_num_layers(fields)
    types = read_mlp_types(fields, num_layers) or (DENSE, *[SPARSE] * (num_layers - 1))
    attention, experts = read_ernie_attention(fields, num_kv_heads=4), _read_experts(fields)
    layers = [
        LayerSpec(mixer=attention, mlp=read_mlp(fields) if each == DENSE else experts)
        for each in types
    ]
    config = ernie_model(fields, layers)
    config = with_vision(config, fields, read_vision(fields, config), _SECTIONS, mixes_axes=False)

    def with_time_last(mixer: MixerSpec) -> MixerSpec:
        assert isinstance(mixer, AttentionSpec), "all layers attend"
        rope = mixer.rope
        if rope is None or not rope.sections:
            return mixer
        if rope.sections[0] != rope.sections[1]:
            raise fields.error(
                f"mrope_section {list(rope.sections)} is not supported; supported: as many pairs "
                "of rows as of columns, before those of time"
            )
        return replace(mixer, rope=replace(rope, time_last=True))

    return config.with_mixers(with_time_last)


def _read_experts(fields: Fields) -> ExpertsByTokensSpec:
    widths: Any = fields.values.get("moe_intermediate_size")
    widths = _INNER if widths is None else widths
    if not isinstance(widths, list) or len(widths) != 2:
        raise fields.error(
            "'moe_intermediate_size' must list the widths of the experts of text and of images, "
            f"not {widths!r}"
        )
    ids = tuple(fields.whole.integer(*each, minimum=0) for each in _TOKENS.items())

    def of_kind(width: Any, are_listed: bool) -> MoESpec:
        own = fields.with_values(fields.values | {"moe_intermediate_size": width})
        return replace(read_ernie_experts(own), tokens=TokenKind(ids=ids, are_listed=are_listed))

    first, second = of_kind(widths[0], False), of_kind(widths[1], True)
    return ExpertsByTokensSpec(first=first, second=replace(second, shared=None))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "ernie4_5_vl_moe_vision", "ernie4_5_vl_moe")
    if vision is None:
        return None
    frames = vision.integer("temporal_merge_size", NUM_FRAMES)
    if frames != NUM_FRAMES:
        raise vision.error(
            f"temporal_merge_size {frames} is not supported; supported: {NUM_FRAMES}"
        )
    of_squares = {"out_hidden_size": config.hidden_size, "temporal_patch_size": 1}
    vision = vision.with_values(vision.values | of_squares)
    shared = read_qwen_tower(vision, config.hidden_size, _VISION_DEFAULTS)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), _IMAGE_TOKEN, config.vocab_size),
        tower=Ernie45VLTower(
            **shared,
            inner=vision.integer("intermediate_size", 5120),
            eps=vision.number("rms_norm_eps", 1e-6),
            last_eps=config.norm.eps,
        ),
        merge_size=shared["merge_size"],
        has_axes=True,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of files, which number the experts of images behind those of text,
    have routers transposed, and the biases of both in one tensor."""
    from torch import Tensor

    from shmllm.models.matrices import joined

    found: NamedWeights = {}
    num_experts = next((each.num_experts for each in config.mixtures), 0)
    for name, views in weights.items():
        own = name.replace(_SECOND, "")
        is_second, view = own != name, views[0]
        if own.endswith(".gate.weight"):
            assert isinstance(view, Tensor), "routers are not quantized"
            found[own + "_1" * is_second] = (view.t(),)
        elif own.endswith(_BIAS):
            if not is_second:
                second = weights[name.replace(_BIAS, _SECOND + _BIAS)][0]
                assert isinstance(view, Tensor), "biases are not quantized"
                assert isinstance(second, Tensor), "biases are not quantized"
                found[own.replace(_BIAS, _BIASES)] = (joined([view[None], second[None]]),)
        elif is_second:
            prefix, number, rest = _EXPERT.split(own, 1)
            found[f"{prefix}.experts.{num_experts + int(number)}.{rest}"] = views
        else:
            found[name] = views
    return found


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    found: NamedWeights = {}
    for name, views in ernie4_5_moe.module_weights(weights, config).items():
        own, kind = name.replace(_SECOND, ""), "vision_moe" if _SECOND in name else "text_moe"
        of_kind = own.replace(".mlp.", f".mlp.{kind}.")
        found[own if ".shared_experts." in own else of_kind] = views
    return found
