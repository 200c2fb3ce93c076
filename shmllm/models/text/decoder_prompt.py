"""Reads what the decoder of an encoder-decoder begins with. It must not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmllm.models.fields import Fields, read_json_object

_FILES = ("generation_config.json", "config.json")
_START, _FORCED = "decoder_start_token_id", "forced_bos_token_id"


def read_decoder_prompt(
    directory: Path, default: int | None, vocab_size: int, overrides: Mapping[str, Any]
) -> tuple[int, ...]:
    """Returns the tokens that the decoder begins with, unless a prompt says otherwise: the first
    one, and the one that transformers makes the model generate behind it, if a file names one.

    Args:
        directory: the model's directory.
        default: the first one, if no file names it; None: there is none.
        vocab_size: the number of tokens.
        overrides: the option `hf_overrides`, which has precedence over the files.

    Raises:
        EngineStartError: a file names what is no token.
    """
    paths = [directory / name for name in _FILES]
    sources = [Fields(read_json_object(path), str(path)) for path in paths if path.is_file()]
    given = Fields(dict(overrides), "hf_overrides")
    start = _first_of([given, *sources], _START, vocab_size)
    if start is None:
        start = default
    if start is None:
        return ()
    forced = _first_of([given] if _FORCED in overrides else sources[:1], _FORCED, vocab_size)
    return (start,) if forced is None else (start, forced)


def _first_of(sources: Sequence[Fields], name: str, vocab_size: int) -> int | None:
    """Returns the token that the first of some files names which names one."""
    for source in sources:
        if source.values.get(name) is not None:
            return source.integer(name, minimum=0, maximum=vocab_size - 1)
    return None
