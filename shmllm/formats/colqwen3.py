"""ColQwen3 and ColQwen3.5 under the names that their publishers give them; the rest of their files
has transformers' terms. This module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = {
    "ColQwen3": "ColQwen3ForRetrieval",
    "ColQwen3_5": "ColQwen3_5ForRetrieval",
    "OpsColQwen3Model": "ColQwen3ForRetrieval",
    "Qwen3VLNemotronEmbedModel": "ColQwen3ForRetrieval",
}
"""The family's own name for each of theirs."""


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of a config.json with the family's own name."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return dict(values)
    return {**values, "architectures": [NAMES.get(names[0], names[0])]}
