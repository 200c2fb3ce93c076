"""What makes a tower's inputs of an item's data, and embeddings by the tower.

Each kind of item has an encoder. The bits of embeddings are the item's own, whatever is encoded
with it. This module must not know how a tower computes, nor what becomes of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.formats.image_settings import pixel_table, read_image_settings
from shmllm.formats.processor_files import missing_settings
from shmllm.formats.video_settings import read_video_settings
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.matrices import Matrix
from shmllm.models.text import encoder as text
from shmllm.models.text.specs import TextSpec
from shmllm.models.vision.specs import VisionSpec
from shmllm.params.items import Grid, Item

Tower = Callable[[Any, Grid], Tensor]
"""Computes the embeddings, [n, width], of an item's inputs: a tensor, or `Tiles`."""
Send = Callable[[npt.NDArray[Any]], Tensor]
"""Copies an array to where a tower computes. It must not let the host wait for a device."""
Encoder = Callable[[Sequence[Item]], list[Tensor]]
"""Returns the embeddings of items, [n, width] each."""


class Tiles(Sequence[Tensor]):
    """The tiles of an image, each of which is prepared when it is asked for.

    Args:
        tiles: (tiles, height, width, 3) uint8.
        prepare: makes [1, 3, height, width] of one, normalised.
    """

    def __init__(
        self, tiles: npt.NDArray[np.uint8], prepare: Callable[[npt.NDArray[np.uint8]], Tensor]
    ) -> None:
        self._tiles = tiles
        self._prepare = prepare

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, number: Any) -> Any:
        return self._prepare(self._tiles[number])[0]


class ImageEncoder:
    """
    Args:
        tower: computes embeddings of pixels, [tiles, 3, height, width], normalised.
        table: [3, 256], what the values of red, green and blue become, where the tower computes and
            in the dtype of its inputs, to which it would round them.
        send: copies pixels to where the tower computes.
    """

    def __init__(self, tower: Tower, table: Tensor, send: Send) -> None:
        self._tower = tower
        self._table = table
        self._send = send

    def __call__(self, items: Sequence[Item]) -> list[Tensor]:
        return [self.encode(item) for item in items]

    def encode(self, item: Item) -> Tensor:
        """A tower computes one tile after the other, and of the others there are bytes on the host
        only."""
        if len(item.data) == 1:
            return self._tower(self._prepare(item.data[0]), item.grid)
        return self._tower(Tiles(item.data, self._prepare), item.grid)

    def _prepare(self, tile: npt.NDArray[np.uint8]) -> Tensor:
        """Return a tower's input, [1, 3, height, width], of one tile, (height, width, 3)."""
        pixels = self._send(tile).permute(2, 0, 1)
        planes = pixels.new_empty((1, *pixels.shape), dtype=self._table.dtype)
        for color in range(3):  # one by one: an index takes eight times the memory of a byte
            planes[0, color] = self._table[color][pixels[color].long()]
        return planes


class VideoEncoder(ImageEncoder):
    """
    Args:
        tower: computes embeddings of frames.
        table, send: see `ImageEncoder`.
        num_frames: how many frames of the video become one of its grid.
        behind: the embeddings behind the last one, or None.
    """

    def __init__(
        self, tower: Tower, table: Tensor, send: Send, num_frames: int, behind: Tensor | None
    ) -> None:
        super().__init__(tower, table, send)
        self._num_frames, self._behind = num_frames, behind

    def encode(self, item: Item) -> Tensor:
        """Compute one frame of the grid after the other: frames do not attend to one another."""
        grid, size = (1, *item.grid[1:]), self._num_frames
        parts = [item.data[start : start + size] for start in range(0, len(item.data), size)]
        found = [self._tower(torch.cat([self._prepare(f) for f in part]), grid) for part in parts]
        return torch.cat(found if self._behind is None else [*found, self._behind])


class GivenEncoder:
    """Takes embeddings that users give in place of items.

    Args:
        dtype: the model's.
        send: copies embeddings to where a tower would compute them.
    """

    def __init__(self, dtype: torch.dtype, send: Send) -> None:
        self._dtype = dtype
        self._send = send

    def __call__(self, items: Sequence[Item]) -> list[Tensor]:
        return [self._send(item.data).to(self._dtype) for item in items]


class TextEncoder:
    """
    Args:
        tower: computes keys and values of the embeddings of tokens, of several texts at a time
            where that does not change their bits.
        table: [vocab, hidden], these embeddings.
        send: copies token ids to where the tower computes.
    """

    def __init__(self, tower: text.Encoder, table: Tensor, send: Send) -> None:
        self._tower = tower
        self._table = table
        self._send = send

    def __call__(self, items: Sequence[Item]) -> list[Tensor]:
        if not self._tower.products.keeps_rows_apart:
            return [self._encode([item]) for item in items]
        return list(self._encode(items).split([len(item.data) for item in items]))

    def _encode(self, items: Sequence[Item]) -> Tensor:
        ids = self._send(np.concatenate([item.data for item in items]))
        return self._tower.encode(F.embedding(ids, self._table), [len(i.data) for i in items])


class SoundEncoder:
    """
    Args:
        tower: computes embeddings of features, [frames, features].
        send: copies features to where the tower computes.
    """

    def __init__(self, tower: Tower, send: Send) -> None:
        self._tower = tower
        self._send = send

    def __call__(self, items: Sequence[Item]) -> list[Tensor]:
        return [self._tower(self._send(item.data), item.grid) for item in items]


def make_encoder(
    modality: str,
    spec: VisionSpec | AudioSpec | TextSpec,
    tower: Any,
    table: Matrix,
    directory: str,
    send: Send,
) -> Encoder:
    """Make the encoder of a kind of item.

    Args:
        modality: the kind.
        spec: what the model computes of it.
        tower: the model's tower for it.
        table: the embeddings of tokens.
        directory: the model's directory.
        send: see `Send`.

    Raises:
        EngineStartError: the directory does not say how images are prepared.
    """
    if isinstance(spec, TextSpec):
        own = table if tower.table is None else tower.table
        assert isinstance(own, Tensor), "no format of an encoder-decoder packs it"
        return TextEncoder(tower, own, send)
    if isinstance(spec, AudioSpec):
        return SoundEncoder(tower, send)
    video = spec.video if modality == "video" else None
    if video is not None:
        settings = read_video_settings(Path(directory), video.processors)
    else:
        settings = read_image_settings(Path(directory))
    if settings is None:
        raise missing_settings(f"{modality}s", Path(directory))
    table = send(pixel_table(settings)).to(tower.input_dtype)
    if video is None:
        return ImageEncoder(tower, table, send)
    return VideoEncoder(tower.embed_frame, table, send, spec.num_joined, tower.behind_video)
