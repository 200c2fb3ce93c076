"""Finds the ids of tokens in a tokenizer's files, which are read as JSON: it needs no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shmllm.formats.processor_files import read_object

_MOST_DIGITS = 10


def added_token_id(directory: Path, text: str) -> int | None:
    """Returns the id of a token that was added to a tokenizer's vocabulary; None if no file has it.

    Args:
        directory: the directory of the tokenizer's files.
        text: that of the token.

    Raises:
        EngineStartError: a file is no JSON.
    """
    for numbers in (_of_tokenizer, _of_settings, _of_list):
        for number in numbers(directory, text):
            if type(number) is int and number >= 0:
                return number
    return None


def _of_settings(directory: Path, text: str) -> list[Any]:
    found = (read_object(directory / "tokenizer_config.json") or {}).get("added_tokens_decoder")
    tokens = found.items() if isinstance(found, dict) else ()
    numbers = [number for number, token in tokens if text_of_token(token) == text]
    return [int(n) for n in numbers if n.isdecimal() and len(n) <= _MOST_DIGITS]


def _of_list(directory: Path, text: str) -> list[Any]:
    return [(read_object(directory / "added_tokens.json") or {}).get(text)]


def _of_tokenizer(directory: Path, text: str) -> list[Any]:
    found = (read_object(directory / "tokenizer.json") or {}).get("added_tokens")
    tokens = [each for each in (found if isinstance(found, list) else ()) if isinstance(each, dict)]
    return [each.get("id") for each in tokens if text_of_token(each) == text]


def text_of_token(token: object) -> str | None:
    """Returns the text of a token, which is its text or an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
