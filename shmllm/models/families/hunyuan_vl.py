"""HunyuanOCR: an encoder for images of any size with embeddings that end rows, and Hunyuan 1 with
several axes.

Its positions have three axes, the column and the row within an image and the number of the image,
or four, the first of which is that of text; see `worker.grid_positions`. ``mrope_section``, or
``xdrope_section``, distributes them over pairs as in the authors' code: transformers 5.24 turns the
two elements of a pair by different axes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from shmllm.models.config import ModelConfig
from shmllm.models.families import hunyuan_v1_dense
from shmllm.models.families.hunyuan_v1_dense import named_weights
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.hunyuan_vl_specs import HunYuanVLTower
from shmllm.models.vision.specs import VisionSpec

__all__ = ["configure", "named_weights", "read_vision"]

_TIED, _SECTIONS = "tie_word_embeddings", ("mrope_section", "xdrope_section")
_ROPES = "rope_parameters", "rope_scaling"
_OTHER_NAMES = {"attention_head_dim": "head_dim", "org_vocab_size": "vocab_size"}
_NUM_AXES = 3, 4


def configure(fields: Fields) -> ModelConfig:
    text = fields.with_values(fields.values | _renamed(fields))
    sections, plain = _without_sections(text)
    config = hunyuan_v1_dense.configure(plain)
    vision = read_vision(fields, config)
    if vision is None:
        return config
    vision = replace(vision, grid_axes=len(sections))

    def with_sections(mixer: MixerSpec) -> MixerSpec:
        assert isinstance(mixer, AttentionSpec), "the family has attention alone"
        assert mixer.rope is not None, "attention rotates in all layers"
        wanted = mixer.rope.rotary_dim // 2
        if len(sections) not in _NUM_AXES or sum(sections) != wanted:
            raise text.error(
                f"images need {_SECTIONS[0]!r} with 3 or 4 positive integers that add up to "
                f"{wanted}, not {list(sections)}; language_model_only=True takes the model "
                "without them"
            )
        return replace(mixer, rope=replace(mixer.rope, sections=sections))

    return replace(config.with_mixers(with_sections), vision=vision)


def _renamed(fields: Fields) -> dict[str, Any]:
    """Returns the fields that older files call otherwise, and the one that counts if it is false in
    both places."""
    text = Fields(fields.whole.table("text_config"), fields.where)
    found: dict[str, Any] = {_TIED: fields.whole.flag(_TIED, True) or text.flag(_TIED, True)}
    for name, own in _OTHER_NAMES.items():
        if fields.values.get(own) is None and fields.values.get(name) is not None:
            found[own] = fields.values[name]
    return found


def _without_sections(fields: Fields) -> tuple[tuple[int, ...], Fields]:
    """Returns how many pairs each axis turns, and the fields without that. The type of older files
    is "xdrope"."""
    sections: Any = ()
    values = dict(fields.values)
    for name in _ROPES:
        rope = Fields(fields.table(name), f"{fields.where}: {name}")
        if not rope.values:
            continue
        given = [rope.values[each] for each in _SECTIONS if rope.values.get(each) is not None]
        if any(each != given[0] for each in given):
            raise rope.error(f"{' and '.join(_SECTIONS)} differ: {given[0]} and {given[1]}")
        sections = given[0] if given else sections
        kind = rope.text("rope_type", rope.text("type", "default"))
        rest = {key: value for key, value in rope.values.items() if key not in _SECTIONS}
        values[name] = rest | {"rope_type": "dynamic" if kind == "xdrope" else kind}
    if not isinstance(sections, list | tuple) or not all(map(_is_count, sections)):
        raise fields.error(f"{_SECTIONS[0]!r} must list positive integers, not {sections!r}")
    return tuple(map(int, sections)), fields.with_values(values)


def _is_count(value: Any) -> bool:
    """Returns whether a value is a positive integer, which files may have as a float."""
    return type(value) in (int, float) and float(value).is_integer() and value >= 1


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "hunyuan_vl_vision", "hunyuan_vl")
    if vision is None:
        return None
    if (frames := vision.integer("temporal_patch_size", 1)) != 1:
        raise vision.error(f"temporal_patch_size {frames} is not supported; supported: 1")
    hidden_size, patch_size = vision.integer("hidden_size", 1152), vision.integer("patch_size", 16)
    merge_size = vision.integer("spatial_merge_size", 2)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 120_120, config.vocab_size),
        tower=HunYuanVLTower(
            hidden_size=hidden_size,
            num_layers=vision.integer("num_hidden_layers", 27, maximum=MOST_LAYERS),
            num_heads=read_num_heads(vision, "num_attention_heads", 16, hidden_size),
            inner=vision.integer("intermediate_size", 4304),
            patch_size=patch_size,
            merge_size=merge_size,
            activation=read_vision_activation(vision, "hidden_act", "gelu"),
            table_side=vision.integer("max_image_size", 2048, minimum=patch_size) // patch_size,
            mode=_read_mode(vision),
            eps=vision.number("rms_norm_eps", 1e-5),
        ),
        merge_size=merge_size,
        has_axes=True,
    )


def _read_mode(vision: Fields) -> Literal["bilinear", "bicubic"]:
    mode = vision.text("interpolate_mode", "bilinear")
    if mode == "bilinear":
        return "bilinear"
    if mode == "bicubic":
        return "bicubic"
    raise vision.error(f"interpolate_mode {mode!r} is not supported; supported: bilinear, bicubic")
