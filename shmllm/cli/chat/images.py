"""Images of a conversation: reads the files that messages name, once, and keeps them prepared.

A message names a file by an `image_url` with file:///, as clients of OpenAI and vLLM do, so that it
can be saved. Its `uuid` is a hash of the file: a file that has changed and is attached again is
another image, and the earlier message keeps the old one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from shmllm.cli.chat.conversation import Message
from shmllm.errors import RequestError

if TYPE_CHECKING:
    from shmllm.frontend.prompt_images import PromptImages, ReadyImage

Part = dict[str, Any]
TYPE = "image_url"
_HASH_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Attachment:
    """An image for the next message.

    Attributes:
        name: its file, as the user wrote it.
        part: the part of the message.
    """

    name: str
    part: Part


def attach_file(name: str) -> Attachment:
    """Reads an image that the user names.

    Raises:
        RequestError: there is none.
    """
    path = Path(os.path.abspath(Path(name).expanduser()))
    _read(name, path)
    part = {"type": TYPE, TYPE: {"url": path.as_uri()}, "uuid": _hash_of(path)}
    return Attachment(name, part)


def check_files(messages: Sequence[Message], source: str) -> list[str]:
    """Checks that the files of saved messages are there, and contain images.

    Args:
        messages: the messages.
        source: the file that they are from, for errors.

    Returns:
        What to say about files that have changed since.

    Raises:
        RequestError: one of them is not, or a URL is no local one.
    """
    remarks = []
    for where, part in _parts(messages):
        path = _path_of(part)
        if path is None:
            continue
        _read(f"{source}: {where}", path)
        if part.get("uuid") not in (None, _hash_of(path)):
            remarks.append(f"{path} has changed since it was attached; the model sees the new one")
    return remarks


class ChatImages:
    """The prepared images of a chat.

    Args:
        images: prepares them.
    """

    def __init__(self, images: PromptImages) -> None:
        self._images = images
        self._ready: dict[tuple[str, str | None], ReadyImage] = {}

    def attach(self, name: str) -> Attachment:
        """Reads an image that the user names, and keeps it.

        Raises:
            RequestError: there is none, or the model takes none.
        """
        _ = self._images.mark  # raises if the model takes no images
        attached = attach_file(name)
        self._prepared(attached.part, name)
        return attached

    def with_pixels(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with prepared images in place of the files that they name.

        Raises:
            RequestError: a file that was not read before cannot be used.
        """
        found = [dict(message) for message in messages]
        for message in found:
            if isinstance(message["content"], list):
                message["content"] = [self._with_pixels(part) for part in message["content"]]
        return found

    def _with_pixels(self, part: Part) -> Part:
        if _path_of(part) is None:
            return part
        return {"type": "image_pil", "image_pil": self._prepared(part, url_of(part))}

    def _prepared(self, part: Part, name: str) -> ReadyImage:
        from shmllm.frontend.prompt_images import GivenImages

        key = (url_of(part), part.get("uuid"))
        if key not in self._ready:
            path = _path_of(part)
            assert path is not None, "a URL of a file"
            [self._ready[key]] = self._images.ready(
                name, GivenImages([_read(name, path)], [None], {})
            )
        return self._ready[key]


def image_names(message: Message) -> list[str]:
    """The names of a message's images, without their folders."""
    parts = (part for _, part in _parts([message]))
    return [path.name if (path := _path_of(part)) else "data" for part in parts]


def url_of(part: Part) -> str:
    """The URL of an image's part; "" if it has none."""
    value = part.get(TYPE)
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, Part]]:
    for index, message in enumerate(messages):
        if isinstance(message["content"], list):
            for place, part in enumerate(message["content"]):
                if part["type"] == TYPE:
                    yield f"messages[{index}].content[{place}]", part


def _path_of(part: Part) -> Path | None:
    """The file that a part names; None if it is something else than a local file."""
    url = url_of(part) if part.get("type") == TYPE else ""
    return Path(unquote(urlsplit(url).path)) if url[:8].lower() == "file:///" else None


def _read(name: str, path: Path) -> Any:
    from shmllm.frontend.images.sources import image_of_path

    return image_of_path(name, path)


def _hash_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:_HASH_LENGTH]
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
