"""Items of a prompt that are prepared, and what identifies them.

This module must import nothing that prepares items: every front end imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from shmllm.params.items import MODALITIES, Modality

if TYPE_CHECKING:
    from shmllm.frontend.items.prepared import PreparedItem


@dataclass(frozen=True, slots=True)
class ReadyItem:
    """A prepared item and what identifies it."""

    modality: Modality
    identity: bytes
    prepared: PreparedItem

    @property
    def parts(self) -> tuple[ReadyItem, ...]:
        """The parts that an engine takes as items, see `PreparedItem.parts`."""
        if not self.prepared.divided:
            return (self,)
        return tuple(
            ReadyItem(self.modality, sha256(self.identity + b"%d" % number).digest(), part)
            for number, part in enumerate(self.prepared.divided)
        )


def by_modality(items: Iterable[ReadyItem]) -> dict[Modality, list[ReadyItem]]:
    """The items of each modality, in their order, as `multi_modal_data` has them."""
    found: dict[Modality, list[ReadyItem]] = {}
    for item in items:
        found.setdefault(item.modality, []).append(item)
    return found


def prepared_of(items: Iterable[ReadyItem]) -> dict[Modality, list[PreparedItem]]:
    """The same without what identifies them. Images are first: what stands for a video may have
    their mark."""
    ordered = sorted(items, key=lambda each: MODALITIES.index(each.modality))
    return {kind: [each.prepared for each in own] for kind, own in by_modality(ordered).items()}
