"""How a model's files say that videos become frames of pixels."""

from __future__ import annotations

from pathlib import Path

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import ImageSettings, settings_of
from shmllm.formats.processor_files import read_object, read_section

VIDEO_PREPROCESSOR = "video_preprocessor_config.json"


def read_video_settings(directory: Path, processor: str) -> ImageSettings | None:
    """Reads the settings of the video processor in a model's directory. Where it has none of its
    own, those of the image processor hold for both, as in transformers.

    Args:
        directory: the model's directory.
        processor: the name of transformers' class for the model, if the file names none.

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
    name = values.get("video_processor_type") if isinstance(values, dict) else None
    if name not in (None, processor):
        raise EngineStartError(f"{path}: video_processor_type {name!r} is not {processor!r}")
    return settings_of(values, str(path), processor)
