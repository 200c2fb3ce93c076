"""What users give as items of prompts, such as images: reads and checks the keys of a prompt.

This module must not open an item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.given_embeds import find_embeds
from shmllm.params.items import COUNTED, MODALITIES, Modality

DATA = "multi_modal_data"
UUIDS = "multi_modal_uuids"


@dataclass(frozen=True, slots=True)
class GivenItem:
    """What a user gives for an item.

    Attributes:
        modality: what it is.
        value: the item, or `GivenEmbeds`; None if one of the same name was given before.
        uuid: the user's name for it; None: it has none.
    """

    modality: Modality
    value: Any
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class GivenItems:
    """What a prompt has of items.

    Attributes:
        items: those of a modality in the order of their marks.
        overrides: `mm_processor_kwargs` of this prompt.
    """

    items: Sequence[GivenItem]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.items)


def has_items(prompt: Mapping[str, Any]) -> bool:
    """Whether a prompt that is a dict has items; it may be malformed."""
    return _is_given(prompt.get(DATA)) or _is_given(prompt.get(UUIDS))


def given_items(name: str, prompt: Mapping[str, Any]) -> GivenItems | None:
    """What a prompt that is a dict has of items; None: nothing.

    Args:
        name: what errors call the prompt.
        prompt: may have "multi_modal_data", "multi_modal_uuids" and "mm_processor_kwargs".

    Raises:
        RequestError: one of them is malformed, or has something unknown.
    """
    data, uuids = (_table(name, prompt, key) for key in (DATA, UUIDS))
    overrides = overrides_of(name, prompt.get("mm_processor_kwargs"))
    found = [
        item
        for modality in dict.fromkeys([*data, *uuids])
        for item in _given_of(name, modality, data.get(modality), uuids.get(modality))
    ]
    return GivenItems(found, overrides) if found else None


def overrides_of(name: str, given: Any) -> Mapping[str, Any]:
    """The `mm_processor_kwargs` of a prompt; None stands for none.

    Raises:
        RequestError: they are no dict.
    """
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"{name}: 'mm_processor_kwargs' must be a dict, got {given!r}")
    return given or {}


def _given_of(name: str, modality: Modality, data: Any, uuids: Any) -> list[GivenItem]:
    values: list[Any] | None = find_embeds(name, modality, data)
    if values is None:
        values = _as_list(modality, data)
    names = _as_list("uuid", uuids) or [None] * len(values)
    if not values and any(each is not None for each in names):
        values = [None] * len(names)
    if len(names) != len(values):
        raise RequestError(
            f"{name} has {counted(modality, len(values))} and {len(names)} uuids of them"
        )
    if any(each is not None and not isinstance(each, str) for each in names):
        raise RequestError(f"{name}: a uuid must be a str or None")
    return [GivenItem(modality, *each) for each in zip(values, names, strict=True)]


def _table(name: str, prompt: Mapping[str, Any], key: str) -> dict[Modality, Any]:
    found = prompt[key] if _is_given(prompt.get(key)) else {}
    if not isinstance(found, Mapping):
        raise RequestError(f'{name}: {key!r} must be a dict such as {{"image": ...}}')
    for modality, value in found.items():
        if modality not in MODALITIES and value is not None:
            raise RequestError(
                f"{name}: {key!r} has {modality!r}; supported are {', '.join(MODALITIES)}"
            )
    return {modality: value for modality, value in found.items() if value is not None}


def _is_given(value: Any) -> bool:
    """Whether it is neither None nor empty. What is no table, such as an array, is for `_table`."""
    return value is not None and not (isinstance(value, Mapping | list | tuple) and not value)


def _as_list(kind: str, value: Any) -> list[Any]:
    """Several items, or one: a tuple may be a sound or video with its rate, a list of numbers a
    sound, and a list of images a video."""
    if value is None:
        return []
    several = isinstance(value, list) or (isinstance(value, tuple) and kind in ("image", "uuid"))
    if several and value and kind == "audio":
        several = not isinstance(value[0], Real)  # numpy's numbers are registered there
    if several and value and kind == "video":
        several = not hasattr(value[0], "getbands") and getattr(value[0], "ndim", 4) != 3
    return [*value] if several else [value]


def counted(modality: Modality, count: int) -> str:
    """Such as "1 image" or "2 images"."""
    return f"{count} {COUNTED[modality].removesuffix('s') if count == 1 else COUNTED[modality]}"
