"""Names that files have for a family, and that are another one's or not its own.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEMS = {
    ("model_type", "exaone"): ("Llama", "Exaone"),
    ("model_type", "internlm3"): ("Llama", "InternLM3"),
    ("model_type", "iquestcoder"): ("Llama", "IQuestCoder"),
    ("position_embedding_type", "rotary"): ("XLMRoberta", "JinaEmbeddingsV3"),
}
"""For each field and value that tells a family from another one whose classes' names its files have
in ``architectures``: the beginning of those names, and what the family has instead."""


def own_name(values: Mapping[str, Any], name: str) -> str:
    """Returns the family's own name for an architecture.

    Args:
        values: the fields of config.json.
        name: one of its ``architectures``.
    """
    for (field, value), (written, own) in STEMS.items():
        if values.get(field) == value and name.startswith(written):
            return own + name.removeprefix(written)
    return name


MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
"""Other names for a ``model_type``, as the files of the models' authors have them."""
