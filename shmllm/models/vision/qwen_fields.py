"""Reads the fields that the towers of Qwen and GLM share.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.rope_config import UNTIMED, VideoTimes
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_num_heads,
    read_theta,
    read_vision_activation,
)
from shmllm.models.vision.specs import VideoSpec, VisionSpec


class ItemTokens(NamedTuple):
    """The defaults of ``image_token_id`` and ``video_token_id``."""

    image: int
    video: int


TOKENS = ItemTokens(151655, 151656)
"""Those of Qwen 2 VL, 2.5 VL and 3 VL."""


def read_qwen_tower(
    vision: Fields,
    hidden_size: int,
    defaults: dict[str, Any],
    *,
    width: str = "hidden_size",
    output: str = "out_hidden_size",
) -> dict[str, Any]:
    """Returns the values of a `SquaresTower` but for ``inner``.

    Args:
        vision: the fields of ``vision_config``.
        hidden_size: the width of the language model's embeddings.
        defaults: those of fields that are no numbers of patches or frames.
        width: the name of the field with the width of the stream.
        output: that of the field with the width of the embeddings.
    """
    fields = vision.with_defaults(defaults)
    own = fields.integer(width)
    if (out := fields.integer(output)) != hidden_size:
        raise fields.error(
            f"{output} ({out}) differs from the language model's hidden_size ({hidden_size})"
        )
    num_heads = read_num_heads(fields, "num_heads", 16, own, width)
    check_rotated_heads(fields, own // num_heads)
    return {
        "hidden_size": own,
        "num_layers": fields.integer("depth", maximum=MOST_LAYERS),
        "num_heads": num_heads,
        "patch_size": fields.integer("patch_size"),
        "num_frames": fields.integer("temporal_patch_size", 2),
        "merge_size": fields.integer("spatial_merge_size", 2),
        "activation": read_vision_activation(fields, "hidden_act", "silu"),
        "theta": read_theta(fields),
    }


def read_video(
    fields: Fields,
    processors: tuple[str, ...],
    vocab_size: int,
    *,
    in_one_piece: bool,
    times: VideoTimes = UNTIMED,
    tokens: ItemTokens = TOKENS,
) -> VideoSpec | None:
    """Returns how a model takes videos; None: its vocabulary has no token for them.

    Args:
        fields: what `configure` got.
        processors: see `VideoSpec`.
        vocab_size: the number of tokens.
        in_one_piece, times: see `VideoSpec`.
        tokens: the defaults.
    """
    older = fields.whole.integer("video_token_index", tokens.video, minimum=0)
    token = fields.whole.integer("video_token_id", older, minimum=0)
    if token >= vocab_size:
        return None
    return VideoSpec(
        token=token,
        processors=processors,
        in_one_piece=in_one_piece,
        times=times,
    )


def with_vision(
    config: ModelConfig,
    fields: Fields,
    vision: VisionSpec | None,
    sections: tuple[int, ...],
    *,
    mixes_axes: bool,
) -> ModelConfig:
    """Returns the configuration of a model that sees images, whose attention rotates by three axes
    also if config.json leaves ``mrope_section`` out.

    Args:
        config: the configuration of the language model.
        fields: those of the language model.
        vision: what it computes of images; None: nothing, and it stays as it is.
        sections: the default of ``mrope_section``.
        mixes_axes: `RopeConfig.mixes_axes`, which no field decides on.
    """
    if vision is None:
        return config

    def with_axes(mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AttentionSpec):
            return mixer
        rope = mixer.rope
        assert rope is not None, "attention rotates in all layers"
        found = rope.sections or sections
        if rope.type != "default" or sum(found) != rope.rotary_dim // 2:
            raise fields.error(
                f"images need a rotation of the type 'default' with an mrope_section that adds up "
                f"to {rope.rotary_dim // 2}; language_model_only=True takes the model without them"
            )
        return replace(mixer, rope=replace(rope, sections=found, mixes_axes=mixes_axes))

    return replace(config.with_mixers(with_axes), vision=vision)
