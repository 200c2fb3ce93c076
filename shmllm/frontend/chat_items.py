"""Takes the items, such as images, out of conversations: each part that is one becomes a short part
that says so, such as {"type": "image"}.

This module knows the forms that vLLM, OpenAI and transformers give such parts. It must not know
templates, nor how an item becomes part of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.given_embeds import GivenEmbeds, find_embeds
from shmllm.frontend.given_items import GivenItem, GivenItems
from shmllm.frontend.text.chat_messages import ITEM_PARTS
from shmllm.params.items import Modality

_KINDS: dict[str, Modality] = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "image_embeds": "image",
    "audio_embeds": "audio",
    "video_embeds": "video",
}
"""The types of parts, which are also the names of the fields with the items, and what they are. The
first field that a part has is its type if it has none."""
_FIELDS = {"input_image": "image_url"}
"""The fields with the items where they have other names."""


def take_items(messages: Any, folder: str) -> tuple[Any, GivenItems]:
    """Takes the items out of a conversation.

    Args:
        messages: the messages.
        folder: the folder below which URLs may name files; empty: nowhere.

    Returns:
        The messages with a part of `ITEM_PARTS` for each item, the same object if there are none;
        and the items.

    Raises:
        RequestError: a part is of a kind that is not supported, or names no item that can be read.
    """
    items: list[GivenItem] = []
    if isinstance(messages, list | tuple):
        found = [
            _without_items(message, f"messages[{index}]", folder, items)
            for index, message in enumerate(messages)
        ]
        messages = found if items else messages
    return messages, GivenItems(items)


def _without_items(message: Any, where: str, folder: str, items: list[GivenItem]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    for index, part in enumerate(content):
        kind = _kind_of(part) if isinstance(part, Mapping) else None
        here = f"{where}.content[{index}]"
        if kind not in _KINDS:
            parts.append(part)
            continue
        modality, uuid = _KINDS[kind], _uuid_of(part, here)
        items.append(GivenItem(modality, _value_of(part, kind, here, folder, uuid), uuid))
        parts.append(dict(ITEM_PARTS[modality]))
    return {**message, "content": parts}


def _kind_of(part: Mapping[str, Any]) -> Any:
    kind = part.get("type")
    if kind is None:
        return next((each for each in _KINDS if each in part), None)
    return kind if isinstance(kind, str) else None


def _uuid_of(part: Mapping[str, Any], where: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise RequestError(f"{where}: 'uuid' must be a str, got {uuid!r}")
    return uuid


def _value_of(part: Mapping[str, Any], kind: str, where: str, folder: str, uuid: str | None) -> Any:
    field = _FIELDS.get(kind, kind)
    value = next((part[key] for key in (field, "url") if part.get(key) is not None), None)
    if field.endswith("_url") and isinstance(value, Mapping):
        value = value.get("url")
    if kind == "input_audio" and isinstance(value, Mapping):
        value = value.get("data")
    if kind.endswith("_embeds") and value is not None:
        return _embeds_of(kind, where, value)
    if isinstance(value, str):
        return _item_of_text(kind, where, value, folder)
    if value is None and uuid is None:
        raise RequestError(f"{where} has no {_KINDS[kind]}: give it as {field!r}")
    return value


def _embeds_of(kind: str, where: str, value: Any) -> GivenEmbeds:
    found = find_embeds(where, _KINDS[kind], value)
    if found is None:
        return GivenEmbeds(value)
    if len(found) != 1:
        raise RequestError(f"{where} has {len(found)} items: give each in a part of its own")
    return found[0]


def _item_of_text(kind: str, where: str, text: str, folder: str) -> Any:
    """The item that a text names, or contains."""
    from shmllm.frontend.items import files

    if kind != "input_audio":
        return files.item_of_url(_KINDS[kind], where, text, folder or None)
    from shmllm.frontend.sources import bytes_of_base64

    return files.item_of_bytes("audio", where, bytes_of_base64(where, text))
