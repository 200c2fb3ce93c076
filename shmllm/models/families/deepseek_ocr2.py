"""DeepSeek-OCR 2: SAM's encoder, a decoder of Qwen 2 that reads what it makes of an image, and
DeepSeek-V2's experts with Llama's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v2 import read_experts
from shmllm.models.families.deepseek_v32 import with_mlps
from shmllm.models.families.got_ocr2 import read_sam
from shmllm.models.fields import Fields
from shmllm.models.readers import (
    FULL,
    read_attention,
    read_layer_types,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.vision.fields import MOST_LAYERS, read_item_token, read_num_heads, vision_fields
from shmllm.models.vision.sam_specs import DeepseekOcr2Tower, ReaderSpec, TwoSizesTower
from shmllm.models.vision.specs import VisionSpec

_DEFAULTS = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_TIED = "tie_word_embeddings"
IMAGE_TOKEN = 128_815


def configure(fields: Fields) -> ModelConfig:
    model = read_text_model(fields)
    return replace(model, vision=read_vision(fields, model.vocab_size))


def read_text_model(fields: Fields) -> ModelConfig:
    """Returns the language model: DeepSeek-V2's experts with Llama's attention."""
    tied = fields.whole.flag(_TIED, False)  # that of the language model does not count
    fields = fields.with_values(fields.values | {_TIED: tied, "head_dim": None})
    fields = fields.with_defaults(_DEFAULTS)
    if fields.values.get("mlp_layer_types") is None:
        fields.integer("first_k_dense_replace", minimum=0)  # one of both is required
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", False)
    attention = with_rope(read_attention(fields, bias=bias, output_bias=bias), fields, positions)
    layers = with_mlps(fields, [attention] * read_num_layers(fields), read_experts(fields))
    return read_model(fields, layers, positions)


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "deepseek_ocr2_vision")
    if vision is None:
        return None
    reader = _read_reader(section(vision, "encoder_config", "deepseek_ocr2_encoder"))
    sam = section(vision, "sam_config", "deepseek_ocr2_sam_vision_model")
    width, ratio = sam.integer("hidden_size", 768), sam.number("mlp_ratio", 4.0)
    sam = sam.with_defaults({"mlp_dim": int(width * ratio), "downsample_channels": [512, 896]})
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), IMAGE_TOKEN, vocab_size),
        tower=DeepseekOcr2Tower(**read_halved(sam, reader.hidden_size), reader=reader),
    )


def section(vision: Fields, name: str, model_type: str) -> Fields:
    """Returns the fields of a part of ``vision_config``, whose defaults count if it is absent."""
    part = vision.section(name, model_type)
    return Fields({}, f"{vision.where}: {name}") if part is None else part


def read_halved(sam: Fields, width: int) -> dict[str, Any]:
    """Returns the attributes of a `TwoSizesTower`, without what reads the result of convolutions.

    Args:
        sam: the fields of SAM's encoder.
        width: that of the result.
    """
    shared = read_sam(sam)
    encoder = shared["encoder"]
    if encoder.image_size != (size := TwoSizesTower.WHOLE_SIDE * encoder.patch_size):
        raise sam.error(f"image_size {encoder.image_size} is not supported; supported: {size}")
    widths = sam.values["downsample_channels"]
    if not isinstance(widths, list) or len(widths) != 2 or widths[1] != width:
        raise sam.error(
            f"'downsample_channels' must be two numbers, the second one {width}, the hidden_size "
            f"of encoder_config, not {widths!r}"
        )
    inner = Fields({"downsample_channels": widths[0]}, sam.where).integer("downsample_channels")
    return shared | {"inner": inner}


def _read_reader(fields: Fields) -> ReaderSpec:
    for name in ("use_sliding_window", "rope_scaling"):
        if fields.values.get(name):
            raise fields.error(f"{name} {fields.values[name]!r} is not supported")
    num_layers = fields.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    read_layer_types(fields, num_layers, (FULL,))
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.error(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    rope = Fields(fields.table("rope_parameters"), f"{fields.where}: rope_parameters")
    if (kind := rope.text("rope_type", "default")) != "default":
        raise rope.error(f"rope type {kind!r} is not supported; supported: default")
    width = fields.integer("hidden_size", 4096)
    heads = read_num_heads(fields, "num_attention_heads", 32, width)
    if width // heads % 2 or fields.integer("head_dim", width // heads) != width // heads:
        raise fields.error("head_dim must be hidden_size / num_attention_heads, and even")
    given = {"num_key_value_heads": 32} | fields.values  # null: one for each head
    kv_heads = heads if given["num_key_value_heads"] is None else None
    return ReaderSpec(
        hidden_size=width,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads
        or read_num_heads(
            Fields(given, fields.where), "num_key_value_heads", 32, heads, "num_attention_heads"
        ),
        inner=fields.integer("intermediate_size", 22_016),
        eps=fields.number("rms_norm_eps", 1e-6),
        theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0)),
    )
