"""The files in which a model's directory says how items of prompts are prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.text_files import read_text

PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"


def missing_settings(kind: str, directory: Path, *, are_optional: bool = True) -> EngineStartError:
    """The error for a directory that does not say how items are prepared; the caller raises it.

    Args:
        kind: the items, such as "images".
        directory: the model's directory.
        are_optional: whether the model works without such items.
    """
    return EngineStartError(
        f"{directory} has no settings for {kind}; copy {PROCESSOR} or {PREPROCESSOR} of the model "
        f"into it{', or pass language_model_only=True' * are_optional}"
    )


def read_section(directory: Path, name: str) -> tuple[Any, Path] | None:
    """Reads the settings of one of a model's processors.

    Args:
        directory: the model's directory.
        name: of its object in PROCESSOR, where several are together.

    Returns:
        The settings, not checked, and their file: PROCESSOR if it has them, else PREPROCESSOR. None
        if there is neither.

    Raises:
        EngineStartError: a file cannot be read.
    """
    for file, section in ((PROCESSOR, name), (PREPROCESSOR, None)):
        path = directory / file
        values = read_object(path)
        if values is not None and section is not None:
            values = values.get(section)
        if values is not None:
            return values, path
    return None


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads a file with a JSON object; None: there is no such file.

    Raises:
        EngineStartError: it cannot be read, or is something else.
    """
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngineStartError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise EngineStartError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise EngineStartError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
