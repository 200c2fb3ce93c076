"""DeepSeek-VL2: SigLIP, projections of squares of patches, and DeepSeek-V2 or V3, the smallest one
with Llama's attention. The defaults are those of the authors' configuration classes."""

from __future__ import annotations

from dataclasses import replace

from shmllm.formats.deepseek_ocr import has_latents
from shmllm.formats.deepseek_vl2 import FACTOR, PATCH_SIZE, TILE_SIZE
from shmllm.models.config import ModelConfig
from shmllm.models.families import deepseek_ocr2, deepseek_v2, deepseek_v3
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.vision.deepseek_vl2_specs import DeepseekVL2Tower
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.fields import MOST_LAYERS, read_item_token, read_num_heads, vision_fields
from shmllm.models.vision.specs import VisionSpec

_MOST_DEPTH = 64


def configure(fields: Fields) -> ModelConfig:
    if not has_latents(fields.values):
        config = deepseek_ocr2.read_text_model(fields)
    elif fields.values.get("topk_method") == "noaux_tc":
        config = deepseek_v3.configure(fields)
    else:
        config = deepseek_v2.configure(fields)
    return replace(config, vision=read_vision(fields, config))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        config: that of the language model.
    """
    whole = fields.whole
    vision = vision_fields(fields, "vision")
    if vision is None:
        return None
    if whole.values.get("image_token_id") is None:
        raise whole.error("no file of the tokenizer has the token '<image>'")
    check_choice(whole, "tile_tag", "2D")
    check_choice(whole, "global_view_pos", "head")
    encoder = _read_encoder(vision)
    projector = Fields(whole.table("projector_config"), f"{whole.where}: projector_config")
    check_choice(projector, "projector_type", "downsample_mlp_gelu")
    check_choice(projector, "token_pooling", False)
    for name, default, needed in (
        ("input_dim", 1152, encoder.hidden_size),
        ("n_embed", 2048, config.hidden_size),
    ):
        if (found := projector.integer(name, default)) != needed:
            raise projector.error(f"{name} {found} is not supported; supported: {needed}")
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 0, config.vocab_size),
        tower=DeepseekVL2Tower(
            encoder=encoder,
            factor=projector.integer("downsample_ratio", FACTOR, maximum=encoder.side),
            depth=projector.integer("depth", 2, minimum=2, maximum=_MOST_DEPTH),
            inner=config.hidden_size * projector.integer("mlp_ratio", 1),
        ),
    )


def _read_encoder(vision: Fields) -> EncoderSpec:
    check_choice(vision, "class_token", False)
    check_choice(vision, "global_pool", "map")
    check_choice(vision, "ignore_head", True)
    width = vision.integer("width", 1024)
    patch_size = vision.integer("patch_size", PATCH_SIZE)
    return EncoderSpec(
        kind="siglip",
        hidden_size=width,
        num_layers=vision.integer("layers", 24, maximum=MOST_LAYERS),
        num_heads=read_num_heads(vision, "heads", 16, width, "width"),
        inner=int(width * vision.number("mlp_ratio", 4.0)),
        image_size=vision.integer("image_size", TILE_SIZE, minimum=patch_size),
        patch_size=patch_size,
        activation="gelu_tanh",
        eps=1e-6,
    )
