"""Finds the end-of-sequence token of a tokenizer, for models whose own files name none.

The files are read as JSON: this module needs no tokenizer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shmllm.formats.added_tokens import added_token_id, text_of_token
from shmllm.models.config import ModelConfig
from shmllm.models.fields import read_json_object


def with_end_of_tokenizer(config: ModelConfig, directory: Path) -> ModelConfig:
    """Returns the configuration with the tokenizer's end-of-sequence token, if neither config.json
    nor generation_config.json has one; the same otherwise, and for models that generate nothing.

    Args:
        config: the configuration.
        directory: the directory of the tokenizer's files.

    Raises:
        EngineStartError: a file is no JSON.
    """
    if config.eos_token_ids or not config.lm_head:
        return config
    found = end_of_tokenizer(directory)
    if found is None or found >= config.vocab_size:
        return config
    return replace(config, eos_token_ids=(found,))


def end_of_tokenizer(directory: Path) -> int | None:
    """Returns the id of ``eos_token`` of a tokenizer's files; None if they do not say it.

    Raises:
        EngineStartError: a file is no JSON.
    """
    settings = _read(directory / "tokenizer_config.json")
    named = settings if "eos_token" in settings else _read(directory / "special_tokens_map.json")
    text = text_of_token(named.get("eos_token"))
    if text is None:
        return None
    if (added := added_token_id(directory, text)) is not None:
        return added
    vocabulary = _table(_table(_read(directory / "tokenizer.json"), "model"), "vocab")
    found = vocabulary.get(text)
    return found if type(found) is int and found >= 0 else None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}
