"""Prepared items, and a cache of them (vLLM's `mm_processor_cache_gb`)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmllm.params.items import Grid


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item as the engine needs it.

    Attributes:
        data: contiguous and read-only. Of an image pixels, uint8 [tiles, height, width, 3], which
            `pixel_table` in formats/image_settings.py turns into the tower's inputs. Of a sound
            features, float32 [frames, features].
        grid: how they lie. CLIP and SigLIP: (1, 1, 1). Qwen, GLM, EXAONE, Kimi, Mistral 3, Muse
            Glimmer, SigLIP 2 NaFlex, and parts of LFM2-VL and MiniCPM-V: (1, rows, columns) of
            patches before they are merged. Idefics3, SmolVLM: (tiles, rows, columns), the whole
            image is the last tile; rows and columns are 0 if it is the only one. InternVL, Qianfan-
            OCR, Granite-Docling, Aya Vision, Command A Vision and Llama 4: the same, but 1 if it is
            the only one. Gemma 3: (1 + crops, 1, 1), the whole image is the first tile. Ovis 2:
            (tiles, rows, columns), likewise. LLaVA-NeXT and LLaVA-OneVision: (tiles, height, width)
            of the image in pixels, likewise. A sound: (frames, 1, 1), without those behind its end,
            or all of a part; of Music Flamingo (frames, number of the part, 1). Tiles of DeepSeek-
            OCR, 1 and 2: (tiles, rows, columns), the whole: (1, 0, 0).
        num_tokens: the number of its embeddings.
        frame_seconds: of a video the time between two frames of its grid.
        times: of a video what a prompt says of the time of each frame of its grid.
        is_embeds: whether the data are the embeddings, which a user gave, float32 [num_tokens,
            width].
        divided: of an item that the engine computes in parts, such as tiles of several sizes or
            half minutes of a sound, these in the order of their embeddings. It has no data of its
            own, and the grid (parts, rows, columns), where rows and columns say how they lie.
    """

    data: NDArray[Any]
    grid: Grid
    num_tokens: int
    frame_seconds: float = 0.0
    times: tuple[str, ...] = ()
    divided: tuple[PreparedItem, ...] = ()
    is_embeds: bool = False

    @classmethod
    def of_parts(cls, parts: Iterable[PreparedItem], grid: Grid) -> PreparedItem:
        """An item in several parts."""
        divided = tuple(parts)
        num_tokens = sum(part.num_tokens for part in divided)
        return cls(np.empty(0, np.uint8), grid, num_tokens, divided=divided)

    @property
    def parts(self) -> tuple[PreparedItem, ...]:
        """The parts, or the item itself."""
        return self.divided or (self,)

    @property
    def nbytes(self) -> int:
        """The bytes of the data of all parts."""
        return sum(part.data.nbytes for part in self.parts)


class PreparedItems:
    """Prepared items by their identity; the least recently used ones give way.

    Threads may share it. Two threads that prepare the same item at the same time do so twice.

    Attributes:
        most_bytes: the limit of all data together; 0 keeps none.
        num_hits: how often an item was there.
        num_misses: how often it was not.
        num_bytes: of all data that are kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_hits = self.num_misses = self.num_bytes = 0
        self._lock = threading.Lock()
        self._items: OrderedDict[bytes, PreparedItem] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, identity: bytes, prepare: Callable[[], PreparedItem]) -> PreparedItem:
        """The item with an identity; `prepare` is called if it is not there, without the lock."""
        with self._lock:
            known = self._items.get(identity)
            if known is not None:
                self._items.move_to_end(identity)
                self.num_hits += 1
                return known
            self.num_misses += 1
        item = prepare()
        self._keep(identity, item)
        return item

    def clear(self) -> None:
        """Forgets all items. The counts stay."""
        with self._lock:
            self._items.clear()
            self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raises AssertionError if the sum of bytes is wrong or above the limit."""
        with self._lock:
            assert self.num_bytes == sum(each.nbytes for each in self._items.values())
            assert self.num_bytes <= self.most_bytes

    def _keep(self, identity: bytes, item: PreparedItem) -> None:
        if item.nbytes > self.most_bytes:
            return
        with self._lock:
            if identity in self._items:
                return
            self._items[identity] = item
            self.num_bytes += item.nbytes
            while self.num_bytes > self.most_bytes:
                _, oldest = self._items.popitem(last=False)
                self.num_bytes -= oldest.nbytes
