"""Reads the configurations of models that their authors publish beside code of their own in the
terms of transformers. This module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.formats import (
    chatglm,
    colqwen3,
    deepseek_ocr,
    deepseek_vl2,
    internvl_chat,
    nemotron_omni,
    qwen3_aligner,
)

PUBLISHED = frozenset(
    {
        internvl_chat.ARCHITECTURE,
        *deepseek_ocr.KINDS,
        deepseek_vl2.ARCHITECTURE,
        *colqwen3.NAMES,
        *chatglm.NAMES,
        *nemotron_omni.NAMES,
    }
)
"""The names in their ``architectures``."""
_WITH_SETTINGS = (internvl_chat, deepseek_ocr, deepseek_vl2)
_FAMILIES = (*_WITH_SETTINGS, chatglm, colqwen3, nemotron_omni, qwen3_aligner)


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of a config.json in the terms of transformers; that of a model which is
    not published otherwise as it is.

    Args:
        values: the content.
        directory: the model's.

    Raises:
        EngineStartError: a field is not supported, or a file cannot be read.
    """
    for family in _FAMILIES:
        values = family.in_terms_of_transformers(values, directory)
    return dict(values)


def published_image_settings(directory: Path) -> dict[str, Any] | None:
    """Returns the settings of an image processor that a model's config.json amounts to, in the
    terms of transformers' classes; None: other files have them.

    Raises:
        EngineStartError: a file cannot be read, or a field is not supported.
    """
    found = (family.published_image_settings(directory) for family in _WITH_SETTINGS)
    return next((settings for settings in found if settings is not None), None)
