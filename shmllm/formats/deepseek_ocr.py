"""Reads the configurations of DeepSeek-OCR and DeepSeek-OCR 2 as their authors publish them, beside
code of their own, in the terms of transformers: those of its DeepSeek-OCR 2, and of its
Unlimited-OCR, whose vision tower is that of DeepSeek-OCR.

The authors' code has the fields of the language model in config.json itself, vLLM reads those in
``language_config``; files have both. The sizes that ``vision_config`` does not have are numbers in
the authors' code. This module owns the fields; it must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.added_tokens import added_token_id
from shmllm.formats.image_defaults import BICUBIC
from shmllm.formats.processor_files import PROCESSOR, read_object

IMAGE_TOKEN = "<image>"
PROCESSOR_CLASS = "DeepseekOCRProcessor"
"""The name of vLLM's class; the authors' code prepares images in a method of the model."""

_WHOLE_SIDE = 64
_IMAGE_SIZE, _PATCH_SIZE = 1024, 16
_OF_PARTS = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
_SAM = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_CLIP = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_READER = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_OUTER = (
    *("_name_or_path", "architectures", "auto_map", "candidate_resolutions", "global_view_pos"),
    *("language_config", "model_type", "projector_config", "tile_tag", "transformers_version"),
    "vision_config",
)
"""The fields beside those of the language model."""
_REQUIRED = ("hidden_size", "num_hidden_layers", "n_routed_experts", "n_shared_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A model.

    Attributes:
        architecture: its name in transformers, or what that would be.
        model_type: of the class there whose fields it has.
        reader: the name in ``vision_config`` of what reads the result of SAM.
        sizes: makes the fields of the reader of what ``vision_config`` has.
        tile_side: the number of patches in a row of a tile.
        is_second: whether the model is DeepSeek-OCR 2.
    """

    architecture: str
    model_type: str
    reader: str
    sizes: Callable[[dict[str, Any]], dict[str, Any]]
    tile_side: int
    is_second: bool


def _clip(part: dict[str, Any]) -> dict[str, Any]:
    found = _CLIP | part
    return {"intermediate_size": _times(found["hidden_size"], 4)} | found


def _qwen2(part: dict[str, Any]) -> dict[str, Any]:
    width = {"hidden_size": part.pop("dim")} if "dim" in part else {}
    return _READER | width | part


KINDS = {
    "DeepseekOCRForCausalLM": _Kind(
        architecture="DeepseekOcrForConditionalGeneration",
        model_type="unlimited_ocr",
        reader="clip-l-14-224",
        sizes=_clip,
        tile_side=40,
        is_second=False,
    ),
    "DeepseekOCR2ForCausalLM": _Kind(
        architecture="DeepseekOcr2ForConditionalGeneration",
        model_type="deepseek_ocr2",
        reader="qwen2-0-5b",
        sizes=_qwen2,
        tile_side=48,
        is_second=True,
    ),
}
"""By the published names."""


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of config.json in the terms of transformers; that of any other model as
    it is.

    Args:
        values: the content.
        directory: the model's; its tokenizer's files say which token stands for an image.

    Raises:
        EngineStartError: a field is not supported, or a file cannot be read.
    """
    kind = _kind_of(values)
    if kind is None:
        return dict(values)
    where = str(directory / "config.json")
    text = _text(values, where)
    vision = _vision(values, kind, where) if values.get("vision_config") else {}
    if vision:
        _check(values, text["hidden_size"], vision["encoder_config"]["hidden_size"], kind, where)
    token = image_token_of(values, directory)
    found = {name: value for name, value in values.items() if name not in _OUTER}
    found |= {"architectures": [kind.architecture], "model_type": kind.model_type}
    found |= {"text_config": text | {"model_type": "deepseek_ocr2_text"}, "vision_config": vision}
    found["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    return found | ({} if token is None else {"image_token_id": token})


def published_image_settings(directory: Path) -> dict[str, Any] | None:
    """Returns the settings of images in the terms of transformers' `DeepseekOcr2ImageProcessor`;
    None: the model is not published so.

    Raises:
        EngineStartError: a file cannot be read, or a field is not supported.
    """
    values = read_object(directory / "config.json") or {}
    kind = _kind_of(values)
    if kind is None:
        return None
    where = str(directory / "config.json")
    sam = _vision(values, kind, where)["sam_config"]
    tile = _times(sam["patch_size"], kind.tile_side)
    return colour_settings(directory) | {
        "image_processor_type": PROCESSOR_CLASS,
        "crop_to_patches": True,
        "max_patches": 6,
        "min_patches": 2,
        "size": {"height": sam["image_size"], "width": sam["image_size"]},
        "tile_size": tile,
    }


def colour_settings(directory: Path) -> dict[str, Any]:
    """Returns what the processor's file of a published model says of pixels, and the colour around
    images.

    Raises:
        EngineStartError: the file cannot be read, or has something else than numbers.
    """
    given = read_object(directory / PROCESSOR) or {}
    found = {name: given[name] for name in ("image_mean", "image_std") if given.get(name)}
    if given.get("normalize") is not None:
        found["do_normalize"] = given["normalize"]
    mean = found.get("image_mean", [0.5] * 3)
    if not isinstance(mean, list) or any(type(each) not in (int, float) for each in mean):
        raise EngineStartError(
            f"{directory / PROCESSOR}: 'image_mean' must consist of numbers, not {mean!r}"
        )
    return found | {"background_color": [int(255 * each) for each in mean], "resample": BICUBIC}


def image_token_of(values: Mapping[str, Any], directory: Path) -> Any:
    """Returns the id of the token of images, by the tokenizer's files, or by config.json; None:
    neither has it."""
    found = [added_token_id(directory, IMAGE_TOKEN)]
    found += [values.get(f"image_token_{end}") for end in ("id", "index")]
    return next((each for each in found if each is not None), None)


def has_latents(text: Mapping[str, Any]) -> bool:
    """Whether a language model has latent attention, by the fields of the authors' DeepSeek-V2."""
    dims = text.get("qk_nope_head_dim", 128), text.get("qk_rope_head_dim", 64)
    return text.get("use_mla", True) is not False and dims != (0, 0)


def _kind_of(values: Mapping[str, Any]) -> _Kind | None:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return KINDS.get(name) if isinstance(name, str) else None


def _text(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of the language model."""
    outer = {name: value for name, value in values.items() if name not in _OUTER}
    text = table_of(values, "language_config", where) | _without_null(outer)
    for name in _REQUIRED:
        if text.get(name) is None:
            raise EngineStartError(f"{where}: field {name!r} is missing")
    if has_latents(text):
        raise EngineStartError(f"{where}: use_mla true is not supported; supported: false")
    if text.get("sliding_window") is not None:
        raise EngineStartError(
            f"{where}: sliding_window {text['sliding_window']!r} is not supported; supported: null"
        )
    return {"first_k_dense_replace": 0} | text


def _vision(values: Mapping[str, Any], kind: _Kind, where: str) -> dict[str, Any]:
    """Returns the fields of the vision tower."""
    vision = table_of(values, "vision_config", where)
    widths = table_of(vision, "width", f"{where}: vision_config")
    parts = []
    for name in ("sam_vit_b", kind.reader):
        part = _without_null(table_of(widths, name, f"{where}: vision_config: width"))
        parts.append({_OF_PARTS.get(old, old): each for old, each in part.items()})
    size = vision.get("image_size")
    sam = {"image_size": _IMAGE_SIZE if size is None else size, "patch_size": _PATCH_SIZE}
    sam |= _SAM | parts[0]
    sam = {"mlp_dim": _times(sam["hidden_size"], 4)} | sam
    reader, halved = kind.sizes(parts[1]), sam.get("downsample_channels", [512])
    if isinstance(halved, list) and (kind.is_second or len(halved) == 1):
        # Files of DeepSeek-OCR 2 have the second width of DeepSeek-OCR.
        halved = [*halved[:1], reader["hidden_size"]]
    return {"sam_config": sam | {"downsample_channels": halved}, "encoder_config": reader}


def _check(values: Mapping[str, Any], width: Any, read: Any, kind: _Kind, where: str) -> None:
    """Checks what the authors' code has no other ways for.

    Args:
        values: the fields of config.json.
        width: of embeddings.
        read: the width of what the reader makes.
        kind: the model.
        where: the file, for messages.
    """
    projector, at = table_of(values, "projector_config", where), f"{where}: projector_config"
    for table, place, name, supported in (
        (values, where, "tile_tag", "2D"),
        (values, where, "global_view_pos", "head"),
        (projector, at, "projector_type", "linear"),
        (projector, at, "input_dim", _times(read, 1 if kind.is_second else 2)),
        (projector, at, "n_embed", width),
    ):
        if (found := table.get(name)) not in (None, supported):
            raise EngineStartError(
                f"{place}: {name} {found!r} is not supported; supported: {supported!r}"
            )


def table_of(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Returns a nested object; an empty one if it is absent.

    Raises:
        EngineStartError: it is something else.
    """
    found = values.get(name)
    if found is not None and not isinstance(found, dict):
        raise EngineStartError(f"{where}: {name!r} must be an object, not {found!r}")
    return found or {}


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _times(value: Any, factor: int) -> Any:
    """Returns a product; what is no integer as it is, for the reader of the field to refuse."""
    return value * factor if type(value) is int else value
