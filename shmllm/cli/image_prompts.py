"""Prompts with images that a command or a row names beside them.

Images come before the text. A prompt becomes a message of a user if the model has a chat template;
one that has the model's mark for images is completed as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmllm.cli.images import FOLDER_FLAG
from shmllm.errors import RequestError

if TYPE_CHECKING:
    from shmllm.frontend.front_end import FrontEnd
    from shmllm.frontend.prompt_images import ReadyImage

_URL = re.compile(r"(data|file|https?):", re.IGNORECASE)


def prompt_with_images(
    front_end: FrontEnd,
    prompt: str | dict[str, Any] | list[Any],
    images: Sequence[ReadyImage],
    **template: Any,
) -> dict[str, Any]:
    """The prompt for the engine.

    Args:
        front_end: has the chat template and the tokenizer.
        prompt: a text, a dict as `LLM.generate` takes it, or messages whose last one is a text.
        images: at least one.
        template: keyword arguments of the chat template.

    Raises:
        RequestError: the model takes no images, or the template does not take the messages.
    """
    if isinstance(prompt, list):
        return dict(front_end.chat_prompt(_joined(prompt, images), **template))
    given = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    text, mark = given.get("prompt"), front_end.images.mark
    if text is not None and "prompt_token_ids" not in given and mark not in text:
        if _has_template(front_end):
            message = {"role": "user", "content": text}
            return {**given, **prompt_with_images(front_end, [message], images, **template)}
        given["prompt"] = f"{mark}\n" * len(images) + text
    return {**given, "multi_modal_data": {"image": list(images)}}


def _joined(messages: list[Any], images: Sequence[ReadyImage]) -> list[Any]:
    *before, last = messages
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    text = {"type": "text", "text": last["content"]}
    return [*before, {**last, "content": [*parts, text]}]


def _has_template(front_end: FrontEnd) -> bool:
    try:
        front_end.tokenizer.chat_template()
    except RequestError:
        return False
    return True


def images_of_row(front_end: FrontEnd, names: Sequence[str]) -> list[ReadyImage]:
    """The images that a row names.

    Args:
        front_end: prepares them, and has the folder of files.
        names: of each its path, relative to that folder, or a URL.

    Raises:
        RequestError: one cannot be used; the message names it.
    """
    from shmllm.frontend.prompt_images import GivenImages

    images = front_end.images
    pictures = [_open(number, name, images.options.folder) for number, name in enumerate(names, 1)]
    given = GivenImages(pictures, [None] * len(pictures), {})
    return images.ready("'images'", given)


def _open(number: int, name: str, folder: str) -> Any:
    from shmllm.frontend.images.sources import image_of_url

    if _URL.match(name):
        shown = "" if name[:5].lower() == "data:" else f" {name[:200]!r}"
        return image_of_url(f"image {number}{shown}", name, folder or None)
    where = f"image {number} {name[:200]!r}"
    if not folder:
        raise RequestError(f"{where} is a file: {FOLDER_FLAG} DIR says in which folder")
    try:
        url = Path(os.path.abspath(folder), name).as_uri()
    except ValueError as error:
        raise RequestError(f"{where} is no valid path: {error}") from None
    return image_of_url(where, url, folder)
