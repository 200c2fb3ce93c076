"""Takes the images out of conversations: each part that is an image becomes {"type": "image"}.

This module knows the forms that vLLM, OpenAI and transformers give such parts. It must not know
templates, nor how an image becomes part of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.prompt_images import GivenImages
from shmllm.frontend.text.chat_messages import IMAGE_PART

_KEYS = ("image_url", "image_pil", "image")
"""The types of parts, and the names of the field with the image, of OpenAI, vLLM, transformers."""
_REFUSED = ("input_audio", "audio_url", "video_url", "image_embeds", "audio", "video")


def take_images(messages: Any, folder: str) -> tuple[Any, GivenImages]:
    """Takes the images out of a conversation.

    Args:
        messages: the messages.
        folder: the folder below which URLs may name files; empty: nowhere.

    Returns:
        The messages with {"type": "image"} for each image, the same object if there are none; and
        the images.

    Raises:
        RequestError: a part is of a kind that is not supported, or names no image that can be read.
    """
    images: list[Any] = []
    uuids: list[str | None] = []
    if isinstance(messages, list | tuple):
        found = [
            _without_images(message, f"messages[{index}]", folder, images, uuids)
            for index, message in enumerate(messages)
        ]
        messages = found if images else messages
    return messages, GivenImages(images, uuids, {})


def _without_images(
    message: Any, where: str, folder: str, images: list[Any], uuids: list[str | None]
) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _REFUSED:
            raise RequestError(
                f"{where}.content[{index}] is of the type {kind!r}; supported are 'text', "
                "'image_url' and 'image_pil'"
            )
        if kind not in _KEYS:
            parts.append(part)
            continue
        uuids.append(_uuid_of(part, f"{where}.content[{index}]"))
        images.append(_image_of(part, kind, f"{where}.content[{index}]", folder, uuids[-1]))
        parts.append(dict(IMAGE_PART))
    return {**message, "content": parts}


def _uuid_of(part: Mapping[str, Any], where: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise RequestError(f"{where}: 'uuid' must be a str, got {uuid!r}")
    return uuid


def _image_of(part: Mapping[str, Any], kind: str, where: str, folder: str, uuid: str | None) -> Any:
    value = next((part[key] for key in (kind, "url") if part.get(key) is not None), None)
    if kind == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, str):
        from shmllm.frontend.images.sources import image_of_url

        return image_of_url(where, value, folder or None)
    if value is None and uuid is None:
        raise RequestError(f"{where} has no image: give it as {kind!r}")
    return value
