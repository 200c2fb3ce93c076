"""Reads the configuration of InternVL as its authors publish it, beside code of their own, in the
terms of transformers' InternVL.

Both have the same weights under other names, see `models.vision.internvl`. This module owns the
fields; it must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.added_tokens import added_token_id, text_of_token
from shmllm.formats.processor_files import read_object

ARCHITECTURE = "InternVLChatModel"
ENCODER = "intern_vit_6b"
"""The ``model_type`` of the published ``vision_config``, whatever its size."""
IMAGE_TOKEN = "<IMG_CONTEXT>"

_ENCODER_DEFAULTS = {
    "hidden_size": 3200,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "image_size": 224,
    "patch_size": 14,
    "norm_type": "rms_norm",
    "qk_normalization": True,
    "qkv_bias": False,
}
_TILED = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of config.json as transformers' InternVL has it; any other as it is.

    Args:
        values: the content.
        directory: the model's; its tokenizer's files say which token stands for an image, and which
            one ends a reply.

    Raises:
        EngineStartError: a field is not supported, or a file cannot be read.
    """
    if not _is_published(values):
        return dict(values)
    where = str(directory / "config.json")
    values, vision = _read(values, where)
    text = _table(values, "llm_config", where)
    settings = read_object(directory / "tokenizer_config.json") or {}
    end = added_token_id(directory, text_of_token(settings.get("eos_token")) or "")
    ends = [text.get("eos_token_id"), end]
    ids = {"image_token_id": added_token_id(directory, IMAGE_TOKEN), "eos_token_id": ends}
    ids["eos_token_id"] = [each for each in ends if each is not None]
    return {
        **{name: value for name, value in values.items() if name != "llm_config"},
        **{name: found for name, found in ids.items() if found not in (None, [])},
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": text,
        "vision_config": vision
        | {"use_qk_norm": vision["qk_normalization"], "attention_bias": vision["qkv_bias"]},
        "vision_feature_layer": values.get("select_layer", -1),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def published_image_settings(directory: Path) -> dict[str, Any] | None:
    """Returns the settings of the image processor that config.json amounts to, in the terms of
    transformers' classes; None: the model is not published so. The file beside it is of a class
    that the authors' code does not use.

    Raises:
        EngineStartError: config.json cannot be read.
    """
    values = read_object(directory / "config.json") or {}
    if not _is_published(values):
        return None
    values, vision = _read(values, str(directory / "config.json"))
    side, is_cut = vision["image_size"], values.get("dynamic_image_size", False)
    return _TILED | {
        "size": {"height": side, "width": side},
        "min_patches": values.get("min_dynamic_patch", 1) if is_cut else 1,
        "max_patches": values.get("max_dynamic_patch", 6) if is_cut else 1,
    }


def _is_published(values: Mapping[str, Any]) -> bool:
    return values.get("architectures") == [ARCHITECTURE]


def _read(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields and those of ``vision_config``, checked and without those that are
    null."""
    values = {name: value for name, value in values.items() if value is not None}
    given = _table(values, "vision_config", where).items()
    vision = {"model_type": ENCODER, **_ENCODER_DEFAULTS}
    vision |= {name: value for name, value in given if value is not None}
    _check(values, vision, where)
    return values, vision


def _table(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    found = values.get(name)
    if not isinstance(found, dict):
        raise EngineStartError(f"{where}: {name!r} must be an object, not {found!r}")
    return found


def _check(values: Mapping[str, Any], vision: Mapping[str, Any], where: str) -> None:
    for name in ("dynamic_image_size", "use_thumbnail"):
        if type(found := values.get(name, False)) is not bool:
            raise EngineStartError(f"{where}: {name!r} must be true or false, not {found!r}")
    for name in ("min_dynamic_patch", "max_dynamic_patch"):
        if type(found := values.get(name, 1)) is not int or found < 1:
            raise EngineStartError(f"{where}: {name!r} must be a positive integer, not {found!r}")
    side, is_cut = vision["image_size"], values.get("dynamic_image_size", False)
    for name, default, supported in (
        ("ps_version", "v1", "v2"),
        ("force_image_size", side, side),
        ("pad2square", False, False),
        ("use_thumbnail", False, is_cut or values.get("use_thumbnail", False)),
    ):
        if (found := values.get(name, default)) != supported:
            raise EngineStartError(
                f"{where}: {name} {found!r} is not supported; supported: {supported!r}"
            )
