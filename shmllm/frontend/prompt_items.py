"""Items of prompts, such as images: prepares each once, and makes items of the wire.

This module must not know how items are prepared or where they are from.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.formats.text_files import read_text
from shmllm.frontend.given_embeds import GivenEmbeds, is_floating, name_of
from shmllm.frontend.given_items import DATA, GivenItem, GivenItems, counted
from shmllm.frontend.item_sizes import check_sizes, check_spans
from shmllm.frontend.items.ready import ReadyItem, prepared_of
from shmllm.params.items import COUNTED, MODALITIES, Item, Modality, Span

if TYPE_CHECKING:
    from shmllm.frontend.items.prepared import PreparedItem, PreparedItems
    from shmllm.frontend.items.processor import ItemProcessor
    from shmllm.frontend.videos.chosen_frames import ChosenFrames

MOST_ITEMS = 999
MOST_UUIDS = 2**16
"""How many of the user's names for items are remembered."""


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """
    Attributes:
        limits: `limit_mm_per_prompt`.
        overrides: `mm_processor_kwargs`.
        folder: `allowed_local_media_path`; empty: no file may be named.
        takes_embeds: `enable_mm_embeds`.
        frames: which frames of encoded videos are used (`media_io_kwargs`); None: those that the
            model's video processor chooses.
    """

    limits: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    takes_embeds: bool = False
    frames: ChosenFrames | None = None


class PromptItems:
    """
    Args:
        info: what the engine says of itself.
        options: the front end's options.

    Attributes:
        num_encoded: see `ItemInfo`.

    Raises:
        EngineStartError: the model's directory does not say how items are prepared, or what it says
            does not suit the model.
        RequestError: a limit or an override is not valid.
    """

    def __init__(self, info: EngineInfo, options: ItemOptions | None = None) -> None:
        self._info = info
        self.num_encoded = info.items.num_encoded
        self.options = options or ItemOptions()
        self._most = {name: _limit_of(self.options.limits, name) for name in MODALITIES}
        self._nonce = os.urandom(16)
        self._of_uuids: OrderedDict[bytes, bytes] = OrderedDict()
        self._processors = self._read_processors() if info.items else {}
        for name, processor in self._processors.items():
            processor.check(self._overrides_of(name, {}))

    def _read_processors(self) -> dict[Modality, ItemProcessor[Any]]:
        from shmllm.frontend.items.registry import processors_of_model

        directory = Path(self._info.model_directory)
        config = json.loads(read_text(directory / "config.json"))
        found = processors_of_model(directory, config)
        own = {name: each for name, each in found.items() if name in self._info.items.modalities}
        if self.options.frames is not None:
            from shmllm.frontend.videos.processor import VideoProcessor

            if isinstance(video := own.get("video"), VideoProcessor):
                video.chosen = self.options.frames
        return own

    def _check_taken(self, modality: Modality, name: str = "") -> None:
        """Raises RequestError with the name of a prompt if the model takes no such items."""
        if modality not in self._processors:
            where = f"{name}: " if name else ""
            raise RequestError(f"{where}the model takes no {COUNTED[modality]}")

    def mark(self, modality: Modality) -> str:
        """What stands for an item in a text.

        Raises:
            RequestError: the model takes none.
        """
        self._check_taken(modality)
        return self._processors[modality].mark

    def open(self, modality: Modality, name: str, value: Any) -> Any:
        """Decode an item as the model needs it, such as a `Sound` with the model's rate.

        Raises:
            RequestError: the model takes none, or it cannot be decoded.
        """
        self._check_taken(modality)
        return self._processors[modality].open(name, value)

    @property
    def most_seconds(self) -> int:
        """The length of the longest sound, of a model that hears."""
        from shmllm.frontend.audio.processor import AudioProcessor

        processor = self._processors["audio"]
        assert isinstance(processor, AudioProcessor), "it is the registry's"
        return processor.most_seconds

    @cached_property
    def _cache(self) -> PreparedItems:
        from shmllm.frontend.items.prepared import PreparedItems

        return PreparedItems(self._info.items.cache_bytes)

    def clear(self) -> None:
        """Forget prepared items."""
        self._of_uuids.clear()
        self._cache.clear()

    def ready(self, name: str, given: GivenItems) -> list[ReadyItem]:
        """Prepare the items of a prompt.

        Args:
            name: what errors call the prompt.
            given: its items.

        Raises:
            RequestError: there are too many, the model takes none, or one cannot be used.
        """
        counts = Counter(item.modality for item in given.items)
        for modality, count in counts.items():
            self._check_taken(modality, name)
            if count > self._most[modality] and not self._are_unbounded(modality, given):
                raise RequestError(
                    f"{name} has {counted(modality, count)}; limit_mm_per_prompt allows "
                    f"{self._most[modality]}",
                    parameter=DATA,
                    value=count,
                )
        overrides = {
            modality: {
                **self.overrides_among(modality, count),
                **self._overrides_of(modality, given.overrides),
            }
            for modality, count in counts.items()
        }
        seen: Counter[str] = Counter()
        found = []
        for item in given.items:
            seen[item.modality] += 1
            where = f"{name}: {item.modality} {seen[item.modality]}"
            found.append(self._ready(where, item, overrides[item.modality]))
        return found

    def overrides_among(self, modality: Modality, count: int) -> Mapping[str, Any]:
        """The overrides that items have because a prompt has so many of them, unless the option
        `mm_processor_kwargs` has them, too.

        Raises:
            RequestError: the model takes none.
        """
        self._check_taken(modality)
        found = self._processors[modality].among(count)
        return {name: value for name, value in found.items() if name not in self.options.overrides}

    def _overrides_of(self, modality: Modality, given: Mapping[str, Any]) -> dict[str, Any]:
        """The overrides for a modality. Those that only another one of the model knows are its
        own."""
        every = {**self.options.overrides, **given}
        known = self._processors[modality].known_overrides
        others = {name for each in self._processors.values() for name in each.known_overrides}
        return {name: value for name, value in every.items() if name not in others - known}

    def _ready(self, name: str, given: GivenItem, overrides: Mapping[str, Any]) -> ReadyItem:
        if isinstance(given.value, ReadyItem):
            return given.value
        modality, uuid = given.modality, given.uuid
        if given.value is None:
            return self._of_uuid(name, modality, uuid, overrides)
        embeds = self._embeds_of(modality, given.value)
        if embeds is not None:
            return self._ready_embeds(name, given, embeds, overrides)
        processor = self._processors[modality]
        opened = processor.open(name, given.value)
        if uuid is None:
            identity = processor.identity(opened, overrides, name)
        else:
            identity = self._identity_of_uuid(modality, uuid, processor.size(opened), overrides)
        prepared = self._cache.get(identity, lambda: processor.prepare(opened, overrides, name))
        return ReadyItem(modality, identity, prepared)

    def _are_unbounded(self, modality: Modality, given: GivenItems) -> bool:
        """Whether a limit of 0 does not count the items: embeddings need no tower, and None names
        what was counted before."""
        own = [each.value for each in given.items if each.modality == modality]
        are_embeds = all(
            each.prepared.is_embeds
            if isinstance(each, ReadyItem)
            else each is None or self._embeds_of(modality, each) is not None
            for each in own
        )
        return not self._most[modality] and are_embeds and self.options.takes_embeds

    def _embeds_of(self, modality: Modality, value: Any) -> GivenEmbeds | None:
        """The embeddings that a user gives in place of an item; None: it is the item itself, such
        as samples of two channels."""
        if isinstance(value, GivenEmbeds):
            return value
        is_sound = modality == "audio" and not (
            self.options.takes_embeds and hasattr(value, "detach")
        )
        return GivenEmbeds(value) if is_floating(value, 2) and not is_sound else None

    def _ready_embeds(
        self, name: str, item: GivenItem, given: GivenEmbeds, overrides: Mapping[str, Any]
    ) -> ReadyItem:
        modality, uuid = item.modality, item.uuid
        if not self.options.takes_embeds:
            raise RequestError(
                f"{name} is floating numbers: {name_of(modality)!r} need an engine with "
                "enable_mm_embeds=True, and pixels must be uint8, from 0 to 255"
            )
        prepared = self._processors[modality].take_embeds(name, given, self._info.items.width)
        what = repr((modality, prepared.data.shape, prepared.grid, prepared.frame_seconds))
        if uuid is None:
            return ReadyItem(
                modality, sha256(what.encode() + prepared.data.tobytes()).digest(), prepared
            )
        size = (*prepared.data.shape, *prepared.grid)
        identity = self._identity_of_uuid(modality, uuid, size, overrides)
        return ReadyItem(modality, identity, self._cache.get(identity, lambda: prepared))

    def _identity_of_uuid(
        self, modality: Modality, uuid: str, size: tuple[int, ...], overrides: Mapping[str, Any]
    ) -> bytes:
        """The identity of an item that the user names, so that it is not read. Other front ends
        have other identities for the same name."""
        name = self._key_of_uuid(modality, uuid, overrides)
        identity = sha256(name + repr(size).encode()).digest()
        self._of_uuids[name] = identity
        self._of_uuids.move_to_end(name)
        if len(self._of_uuids) > MOST_UUIDS:
            self._of_uuids.popitem(last=False)
        return identity

    def _key_of_uuid(self, modality: Modality, uuid: str, overrides: Mapping[str, Any]) -> bytes:
        text = json.dumps([modality, uuid, overrides], sort_keys=True, default=repr)
        return sha256(self._nonce + text.encode("utf-8", "surrogatepass")).digest()

    def _of_uuid(
        self, name: str, modality: Modality, uuid: str | None, overrides: Mapping[str, Any]
    ) -> ReadyItem:
        """The item that was given with a UUID before."""

        def missing() -> NoReturn:
            raise RequestError(
                f"{name} is None, and no {modality} with the uuid {uuid!r} is kept: pass the "
                f"{modality}"
            )

        key = None if uuid is None else self._key_of_uuid(modality, uuid, overrides)
        identity = None if key is None else self._of_uuids.get(key)
        if identity is None:
            missing()
        return ReadyItem(modality, identity, self._cache.get(identity, missing))

    def complete(self, text: str, items: Sequence[ReadyItem]) -> str | None:
        """A prompt's text with the special tokens that the model's processor writes; None: the
        tokenizer writes them."""
        counts = Counter(each.modality for each in items)
        found = (self._processors[name].complete(text, count) for name, count in counts.items())
        return next((each for each in found if each is not None), None)

    def alone(self, name: str, items: Sequence[ReadyItem]) -> list[int] | None:
        """The token ids of a prompt that consists of its item; None: prompts have texts, too.

        Raises:
            RequestError: it has several.
        """
        found = self._processors[items[0].modality].token_alone
        if found is None:
            return None
        if len(items) > 1:
            raise RequestError(
                f"{name} has {len(items)} images, and the model makes a vector of one: "
                "pass a prompt for each"
            )
        return [found]

    def expand_text(self, name: str, text: str, items: Sequence[ReadyItem]) -> str:
        """A prompt's text with as many placeholders as the items have embeddings. What an encoder
        computes stands before the text, and has none."""
        if self.num_encoded:
            return text
        for modality, prepared in prepared_of(items).items():
            text = self._processors[modality].expand_text(name, text, prepared)
        return text

    def expand_ids(
        self,
        name: str,
        ids: list[int],
        items: Sequence[ReadyItem],
        encode: Callable[[str], list[int]],
    ) -> list[int]:
        """The same of a prompt's token ids, unless they have so many already."""
        if self.num_encoded:
            return ids
        for modality, prepared in prepared_of(items).items():
            ids = self._processors[modality].expand_ids(name, ids, prepared, encode)
        return ids

    def items(self, name: str, ids: Sequence[int], items: Sequence[ReadyItem]) -> tuple[Item, ...]:
        """The items of a prompt: of one in parts, these.

        Raises:
            RequestError: its placeholders are not those of its items.
        """
        check_sizes(name, [(each.modality, each.prepared) for each in items], self._info)
        if self.num_encoded and len(items) > 1:
            raise RequestError(f"{name} has {len(items)} items, and the model takes one")
        parts = [part for each in items for part in each.parts]
        spans = {
            modality: iter(self._runs(name, modality, ids, prepared))
            for modality, prepared in prepared_of(parts).items()
        }
        found = [
            Item(
                each.identity,
                next(spans[each.modality]),
                each.prepared.grid,
                each.prepared.data,
                each.modality,
                each.prepared.frame_seconds,
                each.prepared.is_embeds,
            )
            for each in parts
        ]
        check_spans(name, found, self._info)
        return tuple(sorted(found, key=lambda item: item.start))

    def _runs(
        self, name: str, modality: Modality, ids: Sequence[int], prepared: Sequence[PreparedItem]
    ) -> Sequence[tuple[Span, ...]]:
        """Of each item of a modality the positions of its embeddings."""
        if self.num_encoded:
            return [((0, each.num_tokens),) for each in prepared]
        return self._processors[modality].runs(name, ids, prepared)

    def check_given(self, name: str, given: GivenItems | None) -> None:
        """Raises RequestError if a prompt has no item and the model needs one."""
        if self.num_encoded and not given and not self._info.items.has_encoder_text:
            (modality,) = self._info.items.modalities
            raise RequestError(
                f"{name} has no {modality}, and the model's text is about one: pass "
                f'{{"prompt": ..., "{DATA}": {{"{modality}": ...}}}}',
                parameter=DATA,
            )


def _limit_of(limits: Mapping[str, Any], modality: Modality) -> int:
    """The most items of a prompt.

    Raises:
        RequestError: the limit is not valid.
    """
    found = limits.get(modality, MOST_ITEMS)
    if isinstance(found, Mapping):  # as vLLM describes what it profiles
        found = found.get("count", MOST_ITEMS)
    if type(found) is not int or found < 0:
        raise RequestError(f"limit_mm_per_prompt must be a number for {modality!r}, got {found!r}")
    return found
