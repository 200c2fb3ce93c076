"""The part of a model's config.json that describes its thinker: what reads and writes the text of a
model that speaks, too. The other parts, which make speech of it, are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import EngineStartError

THINKERS = {
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""For each architecture of a whole model, that of its thinker."""
PREFIX = "thinker."
"""The prefix of the names of the thinker's weights in the checkpoint of a whole model."""

_PART = "thinker_config"
_OUTER_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
"""The fields that hold for the thinker although they are beside its own."""


def thinker_of(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Returns the fields of a model's thinker; of a model without such a part, its own.

    Args:
        config: the content of config.json.
        where: its name in messages.

    Raises:
        EngineStartError: the part is no object.
    """
    part = config.get(_PART)
    if part is None:
        return dict(config)
    if not isinstance(part, Mapping):
        raise EngineStartError(f"{where}: {_PART!r} must be an object, not {part!r}")
    outer = {name: config[name] for name in _OUTER_FIELDS if config.get(name) is not None}
    names = config.get("architectures")
    if isinstance(names, list):
        names = [THINKERS.get(each, each) if isinstance(each, str) else each for each in names]
    return {**part, **outer, "architectures": names}
