"""Finds the end-of-sequence token of a tokenizer, for models whose own files name none.

The files are read as JSON: this module needs no tokenizer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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
    text = _text_of(named.get("eos_token"))
    if text is None:
        return None
    tokenizer = _read(directory / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    ids: dict[Any, Any] = {
        _text_of(each): each.get("id")
        for each in (added if isinstance(added, list) else ())
        if isinstance(each, dict)
    }
    found = ids.get(text, _table(_table(tokenizer, "model"), "vocab").get(text))
    for number, token in _table(settings, "added_tokens_decoder").items():
        if found is None and _text_of(token) == text and number.isdecimal():
            found = int(number)
    return found if type(found) is int and found >= 0 else None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _text_of(token: object) -> str | None:
    """The text of a token, which is its text or an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
