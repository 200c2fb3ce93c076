"""How a model's files say that videos become frames of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import ImageSettings, settings_of
from shmllm.formats.processor_files import PREPROCESSOR, read_object, read_section

VIDEO_PREPROCESSOR = "video_preprocessor_config.json"


def read_video_settings(
    directory: Path, processors: Sequence[str], own: Mapping[str, Any] = MappingProxyType({})
) -> ImageSettings | None:
    """Reads the settings of the video processor in a model's directory. Where it has none of its
    own, those of the image processor hold for both, as in transformers.

    Args:
        directory: the model's directory.
        processors: the names of transformers' classes for the model, of which the file may name
            one; the first one if it names none.
        own: what takes the place of fields of the image processor; None is the default of the
            class of the video processor.

    Returns:
        None if the directory has none.

    Raises:
        EngineStartError: a file cannot be read, or a field has a wrong type.
    """
    path = directory / VIDEO_PREPROCESSOR
    values = read_object(path)
    found = read_section(directory, "video_processor") if values is None else (values, path)
    if found is None:
        return None
    values, path = found
    if path.name == PREPROCESSOR and isinstance(values, dict):
        values = {**values, **own}
    name = values.get("video_processor_type") if isinstance(values, dict) else None
    if name not in (None, *processors):
        known = " or ".join(map(repr, processors))
        raise EngineStartError(f"{path}: video_processor_type {name!r} is not {known}")
    return settings_of(values, str(path), name or processors[0])
