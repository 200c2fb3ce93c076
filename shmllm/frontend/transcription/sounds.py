"""The sounds that users give to be transcribed or aligned."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from shmllm.errors import RequestError
from shmllm.frontend.prompt_items import PromptItems

if TYPE_CHECKING:
    from shmllm.frontend.audio.sound import Sound as OpenedSound

Sound = str | os.PathLike[str] | bytes | tuple[Any, int]
"""A path, encoded bytes, or (samples, rate)."""


def as_list(sounds: Sound | Sequence[Sound]) -> Sequence[Sound]:
    """Return one or several sounds as several.

    Raises:
        RequestError: they are neither.
    """
    if isinstance(sounds, str | bytes | os.PathLike) or _is_pair(sounds):
        return [sounds]  # type: ignore[list-item]
    if not isinstance(sounds, Iterable) or hasattr(sounds, "shape"):
        raise RequestError(
            "sounds must be one or several of: a path, encoded bytes, (samples, rate); not "
            f"{type(sounds).__name__}",
            parameter="sounds",
        )
    return sounds  # type: ignore[return-value]


def _is_pair(sounds: object) -> bool:
    """Whether it is (samples, rate), and not two sounds."""
    return isinstance(sounds, tuple) and len(sounds) == 2 and isinstance(sounds[1], Real)


def sound_name(number: int, sound: Sound) -> str:
    """What errors call a sound."""
    if isinstance(sound, str | os.PathLike):
        return f"sound {number} ({os.fspath(sound)})"
    return f"sound {number}"


def open_sound(items: PromptItems, name: str, sound: Sound) -> OpenedSound:
    """Decode a sound, with the sampling rate of the model.

    Args:
        items: the front end's.
        name: what errors call it.
        sound: a path, encoded bytes, or (samples, rate).

    Raises:
        RequestError: it cannot be read, or the model takes no sounds.
    """
    content: Any = sound
    if isinstance(sound, str | os.PathLike):
        from shmllm.frontend.items.files import item_of_path

        content = item_of_path("audio", name, sound)
    opened: OpenedSound = items.open("audio", name, content)
    return opened
