"""Prepared images, and a cache of them (vLLM's `mm_processor_cache_gb`)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shmllm.frontend.images.rules.family import Grid


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the engine needs it.

    Attributes:
        pixels: uint8 [tiles, height, width, 3], contiguous and read-only. `pixel_table` in
            formats/image_settings.py turns them into the tower's inputs.
        grid: how the tiles lie. CLIP and SigLIP: (1, 1, 1). Qwen: (1, rows, columns) of patches
            before they are merged. Idefics3, SmolVLM: (tiles, rows, columns), the whole image is
            the last tile; rows and columns are 0 if it is the only one. Gemma 3: (1 + crops, 1, 1),
            the whole image is the first tile.
        num_tokens: the number of its embeddings.
    """

    pixels: NDArray[np.uint8]
    grid: Grid
    num_tokens: int


class PreparedImages:
    """Prepared images by their identity; the least recently used ones give way.

    Threads may share it. Two threads that prepare the same image at the same time do so twice.

    Attributes:
        most_bytes: the limit of all pixels together; 0 keeps none.
        num_hits: how often an image was there.
        num_misses: how often it was not.
        num_bytes: of all pixels that are kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_hits = self.num_misses = self.num_bytes = 0
        self._lock = threading.Lock()
        self._images: OrderedDict[bytes, PreparedImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    def get(self, identity: bytes, prepare: Callable[[], PreparedImage]) -> PreparedImage:
        """The image with an identity; `prepare` is called if it is not there, without the lock."""
        with self._lock:
            known = self._images.get(identity)
            if known is not None:
                self._images.move_to_end(identity)
                self.num_hits += 1
                return known
            self.num_misses += 1
        image = prepare()
        self._keep(identity, image)
        return image

    def clear(self) -> None:
        """Forgets all images. The counts stay."""
        with self._lock:
            self._images.clear()
            self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raises AssertionError if the sum of bytes is wrong or above the limit."""
        with self._lock:
            assert self.num_bytes == sum(each.pixels.nbytes for each in self._images.values())
            assert self.num_bytes <= self.most_bytes

    def _keep(self, identity: bytes, image: PreparedImage) -> None:
        if image.pixels.nbytes > self.most_bytes:
            return
        with self._lock:
            if identity in self._images:
                return
            self._images[identity] = image
            self.num_bytes += image.pixels.nbytes
            while self.num_bytes > self.most_bytes:
                _, oldest = self._images.popitem(last=False)
                self.num_bytes -= oldest.pixels.nbytes
