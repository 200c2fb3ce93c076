"""`hf_overrides` as a function of the model's configuration, as vLLM takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.text_files import one_line


def changed_fields(function: Callable[[Any], Any], directory: Path) -> dict[str, Any]:
    """Returns the fields of config.json that a function changes.

    Args:
        function: gets transformers' configuration of the model, and returns it, or another one, or
            None if it has changed the one that it got.
        directory: the model's directory.

    Raises:
        EngineStartError: transformers has no such configuration, or the function fails.
    """
    from transformers import AutoConfig, PretrainedConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise EngineStartError(
            "hf_overrides is a function of transformers' configuration of the model, which "
            f"transformers cannot make: {one_line(error)}; pass a dict of the fields instead"
        ) from error
    before = config.to_dict()
    try:
        found = function(config)
    except Exception as error:
        raise EngineStartError(
            f"the function hf_overrides failed: {type(error).__name__}: {one_line(error)}"
        ) from error
    if found is not None and not isinstance(found, PretrainedConfig):
        raise EngineStartError(
            f"the function hf_overrides returned {type(found).__name__}: it must return the "
            "configuration that it gets, changed, or None; a dict of fields may take its place"
        )
    after = (config if found is None else found).to_dict()
    return {
        name: value for name, value in after.items() if name not in before or before[name] != value
    }
