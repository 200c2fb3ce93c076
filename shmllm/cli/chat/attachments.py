"""Images, sounds and videos of a conversation: reads the files that messages name, once, and keeps
them prepared.

A message names a file by an `image_url`, `audio_url` or `video_url` with file:///, as clients of
OpenAI and vLLM do, so that it can be saved. Its `uuid` is a hash of the file: a file that has
changed and is attached again is another item, and the earlier message keeps the old one.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from shmllm.cli.chat.conversation import Message
from shmllm.errors import RequestError
from shmllm.frontend.items.files import item_of_path
from shmllm.params.items import Modality

if TYPE_CHECKING:
    from shmllm.frontend.items.ready import ReadyItem
    from shmllm.frontend.prompt_items import PromptItems

Part = dict[str, Any]
TYPES: dict[str, Modality] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""The types of parts that name files."""
_HASH_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Attachment:
    """An item for the next message.

    Attributes:
        modality: what it is.
        name: its file, as the user wrote it.
        part: the part of the message.
    """

    modality: Modality
    name: str
    part: Part


def attach_file(modality: Modality, name: str) -> Attachment:
    """Reads an item that the user names.

    Raises:
        RequestError: there is none.
    """
    path = Path(os.path.abspath(Path(name).expanduser()))
    item_of_path(modality, name, path)
    kind = next(kind for kind, each in TYPES.items() if each == modality)
    part = {"type": kind, kind: {"url": path.as_uri()}, "uuid": _hash_of(path)}
    return Attachment(modality, name, part)


def check_files(messages: Sequence[Message], source: str) -> list[str]:
    """Checks that the files of saved messages are there, and contain what they should.

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
        item_of_path(TYPES[part["type"]], f"{source}: {where}", path)
        if part.get("uuid") not in (None, _hash_of(path)):
            remarks.append(f"{path} has changed since it was attached; the model gets the new one")
    return remarks


class ChatItems:
    """The prepared items of a chat.

    Args:
        items: prepares them.
    """

    def __init__(self, items: PromptItems) -> None:
        self._items = items
        self._ready: dict[tuple[str, str | None, str], ReadyItem] = {}

    def attach(self, modality: Modality, name: str) -> Attachment:
        """Reads an item that the user names, and keeps it.

        Raises:
            RequestError: there is none, or the model takes none.
        """
        self._items.mark(modality)  # raises if the model takes none
        attached = attach_file(modality, name)
        self._prepared(attached.part, name)
        return attached

    def with_items(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with prepared items in place of the files that they name.

        Raises:
            RequestError: a file that was not read before cannot be used.
        """
        counts = Counter(TYPES[part["type"]] for _, part in _parts(messages))
        found = [dict(message) for message in messages]
        for message in found:
            if isinstance(message["content"], list):
                message["content"] = [self._with_item(part, counts) for part in message["content"]]
        return found

    def _with_item(self, part: Part, counts: Mapping[Modality, int]) -> Part:
        if _path_of(part) is None:
            return part
        modality = TYPES[part["type"]]
        item = self._prepared(part, url_of(part), counts[modality])
        return {"type": modality, modality: item}

    def _prepared(self, part: Part, name: str, count: int = 1) -> ReadyItem:
        """The item of a part, as one of so many."""
        from shmllm.frontend.given_items import GivenItem, GivenItems

        modality = TYPES[part["type"]]
        overrides = self._items.overrides_among(modality, count)
        key = (url_of(part), part.get("uuid"), repr(overrides))
        if key not in self._ready:
            path = _path_of(part)
            assert path is not None, "a URL of a file"
            given = GivenItem(modality, item_of_path(modality, name, path))
            [self._ready[key]] = self._items.ready(name, GivenItems([given], overrides))
        return self._ready[key]


def item_names(message: Message) -> list[str]:
    """What a message's items are, and their names without folders, such as "image: cat.png"."""
    return [
        f"{TYPES[part['type']]}: {path.name if (path := _path_of(part)) else 'data'}"
        for _, part in _parts([message])
    ]


def url_of(part: Part) -> str:
    """The URL of an item's part; "" if it has none."""
    value = part.get(part["type"])
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, Part]]:
    for index, message in enumerate(messages):
        if isinstance(message["content"], list):
            for place, part in enumerate(message["content"]):
                if part["type"] in TYPES:
                    yield f"messages[{index}].content[{place}]", part


def _path_of(part: Part) -> Path | None:
    """The file that a part names; None if it is something else than a local file."""
    url = url_of(part) if part.get("type") in TYPES else ""
    return Path(unquote(urlsplit(url).path)) if url[:8].lower() == "file:///" else None


def _hash_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:_HASH_LENGTH]
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
