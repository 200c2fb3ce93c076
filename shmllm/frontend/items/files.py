"""Reads and decodes the items that URLs and paths name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from shmllm.frontend import sources
from shmllm.params.items import Modality

_DECODERS: dict[Modality, tuple[str, str]] = {
    "image": ("shmllm.frontend.images.opening", "open_bytes"),
    "audio": ("shmllm.frontend.audio.decoding", "open_bytes"),
    "video": ("shmllm.frontend.videos.opening", "open_bytes"),
}
"""Module and name of each, which is imported with the first item."""

Folder = str | os.PathLike[str] | None


def item_of_bytes(modality: Modality, name: str, data: bytes) -> Any:
    """Decodes an item.

    Args:
        modality: what it is.
        name: what errors call it.
        data: the content of a file.

    Raises:
        RequestError: it cannot be decoded.
    """
    module, function = _DECODERS[modality]
    decode: Callable[[str, bytes], Any] = getattr(import_module(module), function)
    return decode(name, data)


def item_of_path(modality: Modality, name: str, path: str | os.PathLike[str]) -> Any:
    """Reads the item in a regular file that the user of the process names.

    Raises:
        RequestError: there is no such file, or it cannot be decoded.
    """
    return item_of_bytes(modality, name, sources.bytes_of_path(name, path))


def item_of_url(modality: Modality, name: str, url: str, folder: Folder = None) -> Any:
    """Reads the item of a URL `data:image/...;base64,...` or `file:///...`.

    Args:
        modality: what it is; a data URL has to say the same.
        name: what errors call it.
        url: the URL.
        folder: the folder below which files are read; without it none is.

    Raises:
        RequestError: the URL is of another kind, the file is not allowed, or the item cannot be
            decoded.
    """
    data = sources.bytes_of_url(name, url, modality, folder)
    return item_of_bytes(modality, sources.name_of_url(name, url), data)
