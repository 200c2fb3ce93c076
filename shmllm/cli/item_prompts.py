"""Prompts with items, such as images, that a command or a row names beside them.

Items come before the text. A prompt becomes a message of a user if the model has a chat template;
one that has the model's marks for its items is completed as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmllm.cli.items import FOLDER_FLAG, read_item
from shmllm.errors import RequestError
from shmllm.frontend.given_items import DATA, GivenItem, GivenItems
from shmllm.frontend.items.ready import by_modality
from shmllm.params.items import Modality

if TYPE_CHECKING:
    from shmllm.frontend.front_end import FrontEnd
    from shmllm.frontend.items.ready import ReadyItem

_URL = re.compile(r"(data|file|https?):", re.IGNORECASE)


def prompt_with_items(
    front_end: FrontEnd,
    prompt: str | dict[str, Any] | list[Any],
    items: Sequence[ReadyItem],
    /,
    **template: Any,
) -> dict[str, Any]:
    """The prompt for the engine.

    Args:
        front_end: has the chat template and the tokenizer.
        prompt: a text, a dict as `LLM.generate` takes it, or messages whose last one is a text.
        items: at least one.
        template: keyword arguments of the chat template.

    Raises:
        RequestError: the model does not take the items, or the template does not take the messages.
    """
    if isinstance(prompt, list):
        return dict(front_end.chat_prompt(_joined(prompt, items), **template))
    given = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    text = given.get("prompt")
    marks = [front_end.items.mark(item.modality) for item in items]
    if text is not None and "prompt_token_ids" not in given and marks[0] not in text:
        if _has_template(front_end):
            message = {"role": "user", "content": text}
            return {**given, **prompt_with_items(front_end, [message], items, **template)}
        given["prompt"] = "".join(f"{mark}\n" for mark in marks) + text
    return {**given, DATA: by_modality(items)}


def _joined(messages: list[Any], items: Sequence[ReadyItem]) -> list[Any]:
    *before, last = messages
    parts = [{"type": each.modality, each.modality: each} for each in items]
    text = {"type": "text", "text": last["content"]}
    return [*before, {**last, "content": [*parts, text]}]


def _has_template(front_end: FrontEnd) -> bool:
    """Whether prompts become messages: what only makes vectors may have a template without being
    trained for it."""
    if not front_end.info.pooling.generates:
        return False
    try:
        front_end.tokenizer.chat_template()
    except RequestError:
        return False
    return True


def items_of_paths(front_end: FrontEnd, named: Mapping[Modality, Sequence[str]]) -> list[ReadyItem]:
    """The items of files that the user of a command names.

    Args:
        front_end: prepares them.
        named: of each its path, by modality.

    Raises:
        RequestError: one cannot be used; the message names it.
    """
    given = [read_item(modality, path) for modality, paths in named.items() for path in paths]
    return front_end.items.ready("the row", GivenItems(given))


def items_of_row(front_end: FrontEnd, named: Mapping[Modality, Sequence[str]]) -> list[ReadyItem]:
    """The items that a row names.

    Args:
        front_end: prepares them, and has the folder of files.
        named: of each its path, relative to that folder, or a URL, by modality.

    Raises:
        RequestError: one cannot be used; the message names it.
    """
    folder = front_end.items.options.folder
    given = GivenItems(
        [
            GivenItem(modality, _open(modality, number, name, folder))
            for modality, names in named.items()
            for number, name in enumerate(names, 1)
        ]
    )
    return front_end.items.ready("the row", given)


def _open(modality: Modality, number: int, name: str, folder: str) -> Any:
    from shmllm.frontend.items.files import item_of_url

    if _URL.match(name):
        shown = "" if name[:5].lower() == "data:" else f" {name[:200]!r}"
        return item_of_url(modality, f"{modality} {number}{shown}", name, folder or None)
    where = f"{modality} {number} {name[:200]!r}"
    if not folder:
        raise RequestError(f"{where} is a file: {FOLDER_FLAG} DIR says in which folder")
    try:
        url = Path(os.path.abspath(folder), name).as_uri()
    except ValueError as error:
        raise RequestError(f"{where} is no valid path: {error}") from None
    return item_of_url(modality, where, url, folder)
