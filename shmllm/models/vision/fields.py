"""Reads the fields of ``vision_config`` that families share.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

from shmllm.models.fields import Fields
from shmllm.models.vision.encoder_spec import EncoderSpec, VisionActivation

MOST_LAYERS = 1024
"""Ten times those of the largest towers; each layer of a damaged file would take time."""

_ACTIVATIONS: dict[str, VisionActivation] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}


def vision_fields(fields: Fields, *model_types: str) -> Fields | None:
    """Returns the fields of the model's ``vision_config``; None: it has none, and sees no images.

    Args:
        fields: what `configure` got.
        model_types: what its ``model_type`` may be; the first one if it is absent.
    """
    vision = fields.whole.section("vision_config", *model_types)
    if vision is not None:
        check_channels(vision)
    return vision


def check_channels(vision: Fields) -> None:
    """Checks that images have three channels."""
    for name in ("num_channels", "in_channels", "in_chans"):
        if (count := vision.integer(name, 3)) != 3:
            raise vision.error(f"{name} {count} is not supported; supported: 3")


def read_vision_activation(
    fields: Fields, name: str, default: str, further: Sequence[VisionActivation] = ()
) -> VisionActivation:
    """Returns the activation that the field `name` asks for.

    Args:
        fields: those that have it.
        name: the field.
        default: its meaning where it is absent.
        further: others that the tower's family has.
    """
    found = fields.text(name, default)
    known: dict[str, VisionActivation] = _ACTIVATIONS | {str(each): each for each in further}
    if found not in known:
        listed = ", ".join(known)
        raise fields.error(f"{name} {found!r} is not supported; supported: {listed}")
    return known[found]


def read_num_heads(
    vision: Fields, name: str, default: int, hidden_size: int, width: str = "hidden_size"
) -> int:
    """Returns the number of heads, which divides the width of the stream."""
    num_heads = vision.integer(name, default)
    if hidden_size % num_heads:
        raise vision.error(f"{name} ({num_heads}) must divide {width} ({hidden_size})")
    return num_heads


def read_clip(vision: Fields) -> EncoderSpec:
    """Returns the encoder of a ``clip_vision_model``."""
    return _read_encoder(
        vision, EncoderSpec(
            kind="clip", hidden_size=768, num_layers=12, num_heads=12, inner=3072, image_size=224,
            patch_size=32, activation="quick_gelu", eps=1e-5,
        ), "quick_gelu",
    )  # fmt: skip


def read_siglip(vision: Fields) -> EncoderSpec:
    """Returns the encoder of a ``siglip_vision_model``."""
    return _read_encoder(
        vision, EncoderSpec(
            kind="siglip", hidden_size=768, num_layers=12, num_heads=12, inner=3072, image_size=224,
            patch_size=16, activation="gelu_tanh", eps=1e-6,
        ), "gelu_pytorch_tanh",
    )  # fmt: skip


def read_idefics3(vision: Fields) -> EncoderSpec:
    """Returns the encoder of an ``idefics3_vision`` or a ``smolvlm_vision``."""
    return _read_encoder(
        vision, EncoderSpec(
            kind="siglip", hidden_size=1152, num_layers=12, num_heads=16, inner=3072,
            image_size=224, patch_size=32, activation="gelu_tanh", eps=1e-6, nearest_rows=True,
        ), "gelu_pytorch_tanh",
    )  # fmt: skip


def read_siglip2(vision: Fields) -> dict[str, Any]:
    """Returns the attributes of `Siglip2Tower` that a ``siglip2_vision_model`` has."""
    hidden_size = vision.integer("hidden_size", 768)
    num_positions = vision.integer("num_patches", 256)
    if isqrt(num_positions) ** 2 != num_positions:
        raise vision.error(f"num_patches ({num_positions}) must be a square number")
    return {
        "hidden_size": hidden_size,
        "num_layers": vision.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
        "num_heads": read_num_heads(vision, "num_attention_heads", 12, hidden_size),
        "inner": vision.integer("intermediate_size", 3072),
        "patch_size": read_side(vision, "patch_size", 16),
        "activation": read_vision_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        "num_positions": num_positions,
        "eps": vision.number("layer_norm_eps", 1e-6),
    }


def _read_encoder(vision: Fields, default: EncoderSpec, activation: str) -> EncoderSpec:
    hidden_size = vision.integer("hidden_size", default.hidden_size)
    image_size = vision.integer("image_size", default.image_size)
    patch_size = vision.integer("patch_size", default.patch_size)
    if patch_size > image_size:
        raise vision.error(f"patch_size ({patch_size}) exceeds image_size ({image_size})")
    return EncoderSpec(
        kind=default.kind,
        hidden_size=hidden_size,
        num_layers=vision.integer("num_hidden_layers", default.num_layers, maximum=MOST_LAYERS),
        num_heads=read_num_heads(vision, "num_attention_heads", default.num_heads, hidden_size),
        inner=vision.integer("intermediate_size", default.inner),
        image_size=image_size,
        patch_size=patch_size,
        activation=read_vision_activation(vision, "hidden_act", activation),
        eps=vision.number("layer_norm_eps", default.eps),
        nearest_rows=default.nearest_rows,
    )


def read_item_token(fields: Fields, names: Sequence[str], default: int, vocab_size: int) -> int:
    """Returns the token of whose embeddings an item's take the place.

    Args:
        fields: what `configure` got.
        names: the fields that may name it; the first one that is there does.
        default: its meaning where none is.
        vocab_size: the number of tokens.
    """
    whole = fields.whole
    name = next((name for name in names if whole.values.get(name) is not None), names[0])
    token = whole.integer(name, default, minimum=0)
    if token >= vocab_size:
        raise whole.error(f"{name} ({token}) is no token of a vocabulary of {vocab_size}")
    return token


def read_feature_layer(whole: Fields, num_layers: int, default: int) -> int:
    """Returns the number of layers before the features that ``vision_feature_layer`` chooses: it
    is the number of a layer from 1, or from the end and -1.

    Args:
        whole: the fields around ``vision_config``.
        num_layers: how many there are.
        default: its meaning where it is absent.
    """
    value = whole.values.get("vision_feature_layer")
    return check_feature_layer(whole, default if value is None else value, num_layers)


def check_feature_layer(whole: Fields, layer: Any, num_layers: int) -> int:
    """Returns the number of layers before the features behind one layer.

    Args:
        whole: the fields around ``vision_config``.
        layer: its number from 1, or from the end and -1.
        num_layers: how many there are.
    """
    if type(layer) is not int:
        raise whole.error(f"vision_feature_layer {layer!r} is not supported, only one layer is")
    chosen = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 < chosen <= num_layers:
        raise whole.error(f"vision_feature_layer {layer} is none of the {num_layers} layers")
    return chosen


def read_theta(vision: Fields, default: float = 10_000.0) -> float:
    """Returns the base of the wavelengths of rotations by rows and columns. Older files call these
    "default", or have the base beside ``rope_parameters``."""
    rope = Fields(vision.table("rope_parameters"), f"{vision.where}: rope_parameters")
    if (kind := rope.text("rope_type", "axial")) not in ("axial", "default"):
        raise rope.error(f"rope type {kind!r} is not supported; supported: axial")
    return rope.number("rope_theta", vision.number("rope_theta", default))


def check_rotated_heads(vision: Fields, head_dim: int) -> None:
    """Checks that heads can be rotated by rows and columns."""
    if head_dim % 4:
        raise vision.error(f"heads of {head_dim} elements cannot be rotated by two axes")


def read_layer_indices(
    vision: Fields, name: str, default: Sequence[int], num_layers: int
) -> tuple[int, ...]:
    """Returns the layers that a field lists, in ascending order."""
    found: Any = vision.values.get(name)
    layers = list(default) if found is None else found
    if not isinstance(layers, list) or any(type(each) is not int for each in layers):
        raise vision.error(f"{name!r} must be a list of layers, not {layers!r}")
    if any(not 0 <= each < num_layers for each in layers) or layers != sorted(set(layers)):
        raise vision.error(
            f"{name!r} must list layers below {num_layers} in ascending order, not {layers!r}"
        )
    return tuple(layers)


def read_levels(
    vision: Fields, default: Sequence[int], num_layers: int, most: int
) -> tuple[int, ...]:
    """Returns the layers of a tower that give levels of embeddings, ``deepstack_visual_indexes``.

    Args:
        vision: the fields of ``vision_config``.
        default: their meaning where the field is absent.
        num_layers: the number of the tower's layers.
        most: that of the language model, each of which takes one level.
    """
    layers = read_layer_indices(vision, "deepstack_visual_indexes", default, num_layers)
    if len(layers) > most:
        raise vision.error(
            f"deepstack_visual_indexes lists {len(layers)} layers, and the language model has "
            f"{most}"
        )
    return layers


def read_side(vision: Fields, name: str, default: int) -> int:
    """Returns the side of a square: a field with one number, or with the height and the width."""
    value: Any = vision.values.get(name)
    if isinstance(value, list) and len(value) == 2:
        if value[0] != value[1]:
            raise vision.error(f"{name} {value} is not supported, only a square is")
        return Fields({name: value[0]}, vision.where).integer(name)
    return vision.integer(name, default)


def read_factor(fields: Fields, name: str, side: int) -> int:
    """Returns the side of the squares of patches, whose inverse a field is, by default a half.

    Args:
        fields: those that have it.
        name: the field.
        side: the number of patches in a row.
    """
    ratio = fields.number(name, 0.5)
    factor = round(1 / ratio) if ratio > 1 / (side + 1) else 0
    if not factor or 1 / factor != ratio or side % factor:
        raise fields.error(
            f"{name} {ratio:g} is not supported; supported: 1 / n, where n divides the {side} "
            "patches of a row"
        )
    return factor
