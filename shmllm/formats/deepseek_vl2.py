"""Reads the configuration of DeepSeek-VL2, whose authors publish it beside code of their own: the
language model in the terms of transformers, and the settings of images. This module must not import
torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.formats.deepseek_ocr import colour_settings, image_token_of, table_of
from shmllm.formats.processor_files import PROCESSOR, read_object

ARCHITECTURE = "DeepseekVLV2ForCausalLM"
PROCESSOR_CLASS = "DeepseekVLV2Processor"
"""The name of the authors' class, of which images are a part."""
TILE_SIZE, PATCH_SIZE, FACTOR = 384, 16, 2
"""The defaults of ``image_size`` and ``patch_size`` in ``vision_config``, and of
``downsample_ratio`` in ``projector_config``."""
SIZES = "candidate_resolutions"


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of config.json with the language model's fields where transformers has
    them; that of any other model as it is.

    Args:
        values: the content.
        directory: the model's; its tokenizer's files say which token stands for an image.

    Raises:
        EngineStartError: a field is not an object, or a file cannot be read.
    """
    if values.get("architectures") != [ARCHITECTURE]:
        return dict(values)
    where = str(directory / "config.json")
    text = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    text |= table_of(values, "language_config", where) | table_of(values, "text_config", where)
    token = image_token_of(values, directory)
    return {
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **values,
        "text_config": text,
        **({} if token is None else {"image_token_id": token}),
    }


def published_image_settings(directory: Path) -> dict[str, Any] | None:
    """Returns the settings of images in the terms of `image_settings`; None: the model is another
    one.

    Raises:
        EngineStartError: a file cannot be read, or a field is not supported.
    """
    values = read_object(directory / "config.json") or {}
    if values.get("architectures") != [ARCHITECTURE]:
        return None
    vision = table_of(values, "vision_config", str(directory / "config.json"))
    side = TILE_SIZE if vision.get("image_size") is None else vision["image_size"]
    given = read_object(directory / PROCESSOR) or {}
    sizes = values.get(SIZES) if given.get(SIZES) is None else given[SIZES]
    return colour_settings(directory) | {
        "image_processor_type": PROCESSOR_CLASS,
        "cropping": True,
        "size": {"height": side, "width": side},
        SIZES: [[side, side]] if sizes is None else sizes,
    }
