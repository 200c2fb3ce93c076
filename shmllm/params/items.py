"""Items of a prompt, such as images, as a front end submits them to an engine core."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

Modality = Literal["image", "audio", "video", "text"]
"""What an item is. A text is what an encoder reads: the engine makes the item, of a request's
tokens."""
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")
"""Those of the items that users give and front ends send."""
COUNTED: dict[Modality, str] = {
    "image": "images",
    "audio": "audio clips",
    "video": "videos",
    "text": "texts for an encoder",
}
"""What messages call several of them."""
Grid = tuple[int, int, int]
Span = tuple[int, int]

IDENTITY_BYTES = 32
MOST_ITEM_BYTES = 2**28
"""The most bytes of the data of one item."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image, sound or video of a prompt, or the text that an encoder reads.

    Attributes:
        identity: 32 bytes; items with equal identities have equal modalities, data and grids.
        spans: the half-open intervals of the prompt's positions whose embeddings are the item's, in
            ascending order. The tokens at these positions are placeholders.
        grid: how the model divides the data; its meaning is the family's.
        data: a numpy array: pixels (tiles or frames, height, width, 3) uint8, of a sound (frames,
            features) float32, or of a text token ids, (tokens,) int64. On the wire it may be left
            out: the engine has it from an earlier request of the same front end.
        modality: which of them it is.
        frame_seconds: of a video the time between two frames of its grid.
        is_embeds: whether the data are the embeddings themselves, (embeddings, width) float32. The
            grid has a meaning then only in models whose tokens have positions on several axes.
    """

    identity: bytes
    spans: tuple[Span, ...]
    grid: Grid
    data: Any = None
    modality: Modality = "image"
    frame_seconds: float = 0.0
    is_embeds: bool = False

    @property
    def looks_ahead(self) -> bool:
        """Whether its tokens attend to all of a span, in models whose images do: those of sounds do
        not."""
        return self.modality in ("image", "video")

    @property
    def start(self) -> int:
        """The first of its positions."""
        return self.spans[0][0]

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.spans[-1][1]

    @property
    def num_embeds(self) -> int:
        """The number of its embeddings."""
        return sum(end - begin for begin, end in self.spans)

    def moved(self, distance: int) -> Item:
        """The same item, so many positions later."""
        spans = tuple((begin + distance, end + distance) for begin, end in self.spans)
        return replace(self, spans=spans)


def items_between(items: Sequence[Item], start: int, end: int) -> Iterator[Item]:
    """The items with embeddings between two positions.

    Args:
        items: in the order of their positions.
        start: the first position.
        end: the position behind the last one.
    """
    for index in range(bisect_right(items, start, key=attrgetter("end")), len(items)):
        item = items[index]
        if item.start >= end:
            return
        if any(first < end and start < last for first, last in item.spans):
            yield item
