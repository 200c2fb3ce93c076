"""The part of a model's config.json that describes what reads its prompts: the thinker of a model
that speaks, too, whose other parts, which make speech of text, are left out; or what makes hidden
states of pages for a retriever."""

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

PREFIXES = (PREFIX, "vlm.")
"""The prefixes of the names of the weights of all such parts in checkpoints."""

_PARTS = ("thinker_config", "vlm_config")
_OUTER_FIELDS = ("dtype", "torch_dtype", "embedding_dim", "eos_token_id", "quantization_config")
"""The fields that hold for the part although they are beside its own."""


def thinker_of(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Returns the fields of the part that reads prompts; of a model without such a part, its own.

    Args:
        config: the content of config.json.
        where: its name in messages.

    Raises:
        EngineStartError: the part is no object.
    """
    name = next((each for each in _PARTS if config.get(each) is not None), None)
    if name is None:
        return dict(config)
    part = config[name]
    if not isinstance(part, Mapping):
        raise EngineStartError(f"{where}: {name!r} must be an object, not {part!r}")
    outer = {name: config[name] for name in _OUTER_FIELDS if config.get(name) is not None}
    names = config.get("architectures")
    if isinstance(names, list):
        names = [THINKERS.get(each, each) if isinstance(each, str) else each for each in names]
    return {**part, **outer, "architectures": names}
