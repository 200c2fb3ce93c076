"""Queries and documents as lists of parts, such as those of a message: what vLLM's
`ScoreMultiModalParam` has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shmllm.errors import RequestError
from shmllm.frontend.prompts import MultiModalPrompt, Prompt
from shmllm.frontend.text.chat_messages import ITEM_PARTS

if TYPE_CHECKING:
    from shmllm.frontend.prompt_items import PromptItems

_CONTENT = "content"


def prompts_of_parts(noun: str, given: Sequence[Any], items: PromptItems) -> list[Prompt]:
    """Prompts of what a call scores; those that are no lists of parts stay as they are.

    Args:
        noun: what errors call them.
        given: prompts, or dicts with "content".
        items: knows the marks of items, and the folder of files.

    Raises:
        RequestError: a part is neither a text nor an item, or the model does not take it.
    """
    return [
        _prompt(f"{noun} {index}", each[_CONTENT], items)
        if isinstance(each, Mapping) and each.keys() == {_CONTENT} and each[_CONTENT]
        else each
        for index, each in enumerate(given)
    ]


def _prompt(name: str, parts: Any, items: PromptItems) -> Prompt:
    """The marks of the items, and the texts behind them."""
    from shmllm.frontend.chat_items import take_items

    if not isinstance(parts, list | tuple):
        raise RequestError(f"{name}: 'content' must be a list of parts, got {parts!r}")
    try:
        (message,), found = take_items([{_CONTENT: parts}], items.options.folder)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None
    others = [each for each in message[_CONTENT] if each not in ITEM_PARTS.values()]
    text = "\n".join(_text(name, each) for each in others)
    data: dict[str, list[Any]] = {}
    for item in found.items:
        data.setdefault(item.modality, []).append(item.value)
    if not data:
        return text
    marks = "".join(items.mark(item.modality) for item in found.items)
    return MultiModalPrompt(prompt=marks + text, multi_modal_data=data)


def _text(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise RequestError(f"{name}: a part of 'content' must be a text or an image, got {part!r}")
    return text
