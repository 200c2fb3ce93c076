"""The placeholders of a model, by the name of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.formats.processor_files import PROCESSOR, read_object
from shmllm.frontend.placeholders.family import Config, Placeholder
from shmllm.frontend.placeholders.gemma3 import Gemma3Placeholder
from shmllm.frontend.placeholders.glm4v import Glm4vMoePlaceholder, Glm4vPlaceholder
from shmllm.frontend.placeholders.idefics3 import Idefics3Placeholder
from shmllm.frontend.placeholders.internvl import InternVLPlaceholder
from shmllm.frontend.placeholders.llama4 import Llama4Placeholder
from shmllm.frontend.placeholders.llava import LlavaNextPlaceholder, LlavaPlaceholder
from shmllm.frontend.placeholders.mistral3 import Mistral3Placeholder
from shmllm.frontend.placeholders.qwen2_audio import Qwen2AudioPlaceholder
from shmllm.frontend.placeholders.qwen_vl import (
    Qwen3VideoPlaceholder,
    Qwen3VLPlaceholder,
    QwenVideoPlaceholder,
    QwenVLPlaceholder,
)
from shmllm.params.items import Modality

FAMILIES: dict[str, tuple[type[Placeholder], ...]] = {
    "Glm4vForConditionalGeneration": (Glm4vPlaceholder,),
    "Glm4vMoeForConditionalGeneration": (Glm4vMoePlaceholder,),
    "InternVLForConditionalGeneration": (InternVLPlaceholder,),
    "Llama4ForConditionalGeneration": (Llama4Placeholder,),
    "LlavaForConditionalGeneration": (LlavaPlaceholder,),
    "LlavaNextForConditionalGeneration": (LlavaNextPlaceholder,),
    "Idefics3ForConditionalGeneration": (Idefics3Placeholder,),
    "SmolVLMForConditionalGeneration": (Idefics3Placeholder,),
    "Mistral3ForConditionalGeneration": (Mistral3Placeholder,),
    "Qwen2AudioForConditionalGeneration": (Qwen2AudioPlaceholder,),
    "Qwen2VLForConditionalGeneration": (QwenVLPlaceholder, QwenVideoPlaceholder),
    "Qwen2_5_VLForConditionalGeneration": (QwenVLPlaceholder, QwenVideoPlaceholder),
    "Qwen3VLForConditionalGeneration": (Qwen3VLPlaceholder, Qwen3VideoPlaceholder),
    "Qwen3VLMoeForConditionalGeneration": (Qwen3VLPlaceholder, Qwen3VideoPlaceholder),
    "Gemma3ForConditionalGeneration": (Gemma3Placeholder,),
}
"""One for each modality that the architecture takes."""

_TOKENIZER = "tokenizer_config.json"
_NAMED = ("model_specific_special_tokens", "extra_special_tokens")


def placeholders_of_model(
    directory: Path, config: Mapping[str, Any]
) -> dict[Modality, Placeholder]:
    """The placeholders of a model, by modality.

    Args:
        directory: the model's directory; its tokenizer may name the special tokens.
        config: the content of its config.json.

    Raises:
        EngineStartError: a file cannot be read, or a field is wrong.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    families = FAMILIES.get(name, ()) if isinstance(name, str) else ()
    if not families:
        return {}
    found = Config(config, str(directory / "config.json"))
    texts = _special_texts(directory / PROCESSOR) | _special_texts(directory / _TOKENIZER)
    return {family.modality: family.of(found, texts) for family in families}


def _special_texts(path: Path) -> dict[str, str]:
    """The texts of special tokens by their names in a file, such as "image_token". A token may be
    its text or an object with its text."""
    content = read_object(path) or {}
    named = [content.get(key) for key in _NAMED]
    texts: dict[str, str] = {}
    for table in (content, *(each for each in named if isinstance(each, dict))):
        for name, value in table.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str) and text:
                texts[name] = text
    return texts
