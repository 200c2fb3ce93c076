"""Images of prompts: checks what users give, prepares it once, and makes items of it.

This module must not know how images are prepared or where they are from.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.params.items import Item

if TYPE_CHECKING:
    from shmllm.frontend.images.prepared import PreparedImage, PreparedImages
    from shmllm.frontend.images.processor import ImageProcessor

MOST_IMAGES = 999
MOST_UUIDS = 2**16
"""How many of the user's names for images are remembered."""
NO_IMAGES = "the model takes no images"
IMAGE = "image"
UUIDS = "multi_modal_uuids"


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """
    Attributes:
        limits: `limit_mm_per_prompt`.
        overrides: `mm_processor_kwargs`.
        folder: `allowed_local_media_path`; empty: no file may be named.
    """

    limits: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, slots=True)
class GivenImages:
    """What a prompt has of images.

    Attributes:
        images: what the user gives for each.
        uuids: the user's name for each; None: it has none.
        overrides: `mm_processor_kwargs` of this prompt.
    """

    images: Sequence[Any]
    uuids: Sequence[str | None]
    overrides: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """A prepared image and what identifies it."""

    identity: bytes
    prepared: PreparedImage


class PromptImages:
    """
    Args:
        info: what the engine says of itself.
        options: the front end's options.

    Raises:
        RequestError: a limit is not valid.
    """

    def __init__(self, info: EngineInfo, options: ImageOptions | None = None) -> None:
        self._info = info
        self.options = options or ImageOptions()
        self._most = _limit_of(self.options.limits)
        self._nonce = os.urandom(16)
        self._of_uuids: OrderedDict[bytes, bytes] = OrderedDict()

    @cached_property
    def _processor(self) -> ImageProcessor:
        """Read with the first image."""
        from shmllm.frontend.images.processor import ImageProcessor

        directory = Path(self._info.model_directory)
        found = None
        if self._info.images.most_embeds:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            found = ImageProcessor.of_model(directory, config)
        if found is None:
            raise RequestError(NO_IMAGES)
        return found

    @property
    def mark(self) -> str:
        """What stands for an image in a text.

        Raises:
            RequestError: the model takes no images.
        """
        return self._processor.mark

    @cached_property
    def _cache(self) -> PreparedImages:
        from shmllm.frontend.images.prepared import PreparedImages

        return PreparedImages(self._info.images.cache_bytes)

    def clear(self) -> None:
        """Forget prepared images."""
        self._of_uuids.clear()
        self._cache.clear()

    def ready(self, name: str, given: GivenImages) -> list[ReadyImage]:
        """Prepare the images of a prompt.

        Args:
            name: what errors call the prompt.
            given: its images.

        Raises:
            RequestError: there are too many, the model takes none, or one cannot be used.
        """
        count = len(given.images)
        if count and not self._info.images.most_embeds:
            raise RequestError(NO_IMAGES)
        if count > self._most:
            raise RequestError(
                f"{name} has {count} image{'s' if count > 1 else ''}; limit_mm_per_prompt allows "
                f"{self._most}",
                parameter="multi_modal_data",
                value=count,
            )
        overrides = {**self.options.overrides, **given.overrides}
        return [
            self._ready(f"{name}: image {index}", image, uuid, overrides)
            for index, (image, uuid) in enumerate(zip(given.images, given.uuids, strict=True), 1)
        ]

    def _ready(
        self, name: str, image: Any, uuid: str | None, overrides: Mapping[str, Any]
    ) -> ReadyImage:
        if isinstance(image, ReadyImage):
            return image
        from shmllm.frontend.images.opening import open_image

        if image is None:
            return self._of_uuid(name, uuid, overrides)
        picture = open_image(name, image)
        if uuid is None:
            identity = self._processor.identity(picture, overrides, name)
        else:
            identity = self._identity_of_uuid(uuid, picture.size, overrides)
        prepared = self._cache.get(
            identity, lambda: self._processor.prepare(picture, overrides, name)
        )
        return ReadyImage(identity, prepared)

    def _identity_of_uuid(
        self, uuid: str, size: tuple[int, int], overrides: Mapping[str, Any]
    ) -> bytes:
        """The identity of an image that the user names, so that its pixels are not read. Other
        front ends have other identities for the same name."""
        name = self._key_of_uuid(uuid, overrides)
        identity = sha256(name + repr(size).encode()).digest()
        self._of_uuids[name] = identity
        self._of_uuids.move_to_end(name)
        if len(self._of_uuids) > MOST_UUIDS:
            self._of_uuids.popitem(last=False)
        return identity

    def _key_of_uuid(self, uuid: str, overrides: Mapping[str, Any]) -> bytes:
        text = json.dumps([uuid, overrides], sort_keys=True, default=repr)
        return sha256(self._nonce + text.encode("utf-8", "surrogatepass")).digest()

    def _of_uuid(self, name: str, uuid: str | None, overrides: Mapping[str, Any]) -> ReadyImage:
        """The image that was given with a UUID before."""

        def missing() -> NoReturn:
            raise RequestError(
                f"{name} is None, and no image with the uuid {uuid!r} is kept: pass the image"
            )

        key = None if uuid is None else self._key_of_uuid(uuid, overrides)
        identity = None if key is None else self._of_uuids.get(key)
        if identity is None:
            missing()
        return ReadyImage(identity, self._cache.get(identity, missing))

    def expand_text(self, name: str, text: str, images: Sequence[ReadyImage]) -> str:
        """A prompt's text with as many placeholders as the images have embeddings."""
        return self._processor.expand_text(name, text, [each.prepared for each in images])

    def expand_ids(
        self,
        name: str,
        ids: list[int],
        images: Sequence[ReadyImage],
        encode: Callable[[str], list[int]],
    ) -> list[int]:
        """The same of a prompt's token ids, unless they have so many already."""
        return self._processor.expand_ids(name, ids, [each.prepared for each in images], encode)

    def items(
        self, name: str, ids: Sequence[int], images: Sequence[ReadyImage]
    ) -> tuple[Item, ...]:
        """The items of a prompt.

        Raises:
            RequestError: its placeholders are not those of its images.
        """
        most = self._info.images.most_embeds
        for index, each in enumerate(images, 1):
            if each.prepared.num_tokens > most:
                raise RequestError(
                    f"{name}: image {index} has {each.prepared.num_tokens:,} embeddings, more than "
                    f"the {most:,} that the engine has room for: raise max_num_batched_tokens, or "
                    "make it smaller, by itself or by mm_processor_kwargs"
                )
        runs = self._processor.runs(name, ids, [each.prepared for each in images])
        return tuple(
            Item(each.identity, spans, each.prepared.grid, each.prepared.pixels)
            for each, spans in zip(images, runs, strict=True)
        )


def given_images(name: str, prompt: Mapping[str, Any]) -> GivenImages | None:
    """What a prompt that is a dict has of images; None: nothing.

    Args:
        name: what errors call the prompt.
        prompt: may have "multi_modal_data", "multi_modal_uuids" and "mm_processor_kwargs".

    Raises:
        RequestError: one of them is malformed, or has something else than images.
    """
    data, uuids = (_by_modality(name, prompt, key) for key in ("multi_modal_data", UUIDS))
    images = _as_list(data.get(IMAGE))
    names = _as_list(uuids.get(IMAGE)) or [None] * len(images)
    overrides = prompt.get("mm_processor_kwargs") or {}
    if not isinstance(overrides, Mapping):
        raise RequestError(f"{name}: 'mm_processor_kwargs' must be a dict, got {overrides!r}")
    if not images and any(each is not None for each in names):
        images = [None] * len(names)
    if len(names) != len(images):
        raise RequestError(f"{name} has {len(images)} images and {len(names)} uuids of images")
    if any(each is not None and not isinstance(each, str) for each in names):
        raise RequestError(f"{name}: a uuid must be a str or None")
    return GivenImages(images, names, overrides) if images else None


def _by_modality(name: str, prompt: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = prompt.get(key) or {}
    if not isinstance(found, Mapping):
        raise RequestError(f'{name}: {key!r} must be a dict such as {{"image": ...}}')
    for modality, value in found.items():
        if modality != IMAGE and value is not None:
            raise RequestError(
                f"{name}: {key!r} has {modality!r}; only images are supported: {IMAGE!r}"
            )
    return found


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [*value] if isinstance(value, list | tuple) else [value]


def _limit_of(limits: Mapping[str, Any]) -> int:
    """The most images of a prompt.

    Raises:
        RequestError: the limit is not valid.
    """
    found = limits.get(IMAGE, MOST_IMAGES)
    if isinstance(found, Mapping):  # as vLLM describes what it profiles
        found = found.get("count", MOST_IMAGES)
    if type(found) is not int or found < 0:
        raise RequestError(f"limit_mm_per_prompt must be a number for 'image', got {found!r}")
    return found
