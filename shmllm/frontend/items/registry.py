"""The processors of a model, by the kinds of items that its architecture takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from shmllm.frontend.items.processor import ItemProcessor
from shmllm.frontend.placeholders.family import Placeholder
from shmllm.frontend.placeholders.registry import placeholders_of_model
from shmllm.params.items import Modality

_CLASSES: dict[Modality, tuple[str, str]] = {
    "image": ("shmllm.frontend.images.processor", "ImageProcessor"),
    "audio": ("shmllm.frontend.audio.processor", "AudioProcessor"),
    "video": ("shmllm.frontend.videos.processor", "VideoProcessor"),
}
"""Module and name of each, which is imported with a model that needs it."""

Make = Callable[[Path, Placeholder], ItemProcessor[Any]]


def processors_of_model(
    directory: Path, config: Mapping[str, Any]
) -> dict[Modality, ItemProcessor[Any]]:
    """The processors of a model.

    Args:
        directory: the model's directory.
        config: the content of its config.json.

    Returns:
        Nothing if the architecture takes text only.

    Raises:
        EngineStartError: a file is missing or wrong, or its settings are not supported.
    """
    found: dict[Modality, ItemProcessor[Any]] = {}
    for modality, placeholder in placeholders_of_model(directory, config).items():
        module, name = _CLASSES[modality]
        make: Make = getattr(import_module(module), name).of_model
        found[modality] = make(directory, placeholder)
    return found
