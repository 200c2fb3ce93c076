"""The embeddings of images: computed by the model's tower, kept by number, copied into steps.

The plan says what is encoded, used and forgotten. This module must not know which requests there
are, nor how a tower computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.core.plan import StepPlan
from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table, read_image_settings
from shmllm.models.vision.specs import VisionSpec
from shmllm.params.items import Grid, Item
from shmllm.worker.batch import StepInputs
from shmllm.worker.item_places import item_places
from shmllm.worker.loading import LoadedModel, image_info
from shmllm.worker.prompt_embeds import FoundEmbeds

Tower = Callable[[Tensor, Grid], Tensor]
"""Computes the embeddings, [n, width], of pixels, [tiles, 3, height, width], normalised."""
Send = Callable[[npt.NDArray[Any]], Tensor]
"""Copies an array to where a tower computes. It must not let the host wait for a device."""


class ItemEmbeds:
    """
    Args:
        tower: computes embeddings of one item, so that their bits are its own; None: the model has
            none.
        table: [3, 256], what the values of red, green and blue become, where the tower computes and
            in the dtype of its products, to which it would round them.
        send: copies pixels to where the tower computes.
    """

    def __init__(
        self, tower: Tower | None, table: Tensor | None, send: Send = torch.tensor
    ) -> None:
        self._tower = tower
        self._table = table
        self._send = send
        self._by_number: dict[int, Tensor] = {}

    def update(self, plan: StepPlan) -> None:
        """Forget and compute embeddings, in this order."""
        for number in plan.forgotten:
            self._by_number.pop(number, None)  # a sleep may have dropped it
        for number, item in plan.encodes:
            self._by_number[number] = self._encode(item)

    def _encode(self, item: Item) -> Tensor:
        """Compute the embeddings of an item, one tile after the other: a tower does that as well,
        and of the others there are bytes on the host only."""
        assert self._tower is not None, "the model takes images"
        grid = 1, *item.grid[1:]
        found = [self._tower(self._prepare(tile), grid) for tile in item.pixels]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _prepare(self, tile: npt.NDArray[np.uint8]) -> Tensor:
        """Return a tower's input, [1, 3, height, width], of one tile, (height, width, 3)."""
        table = self._table
        assert table is not None, "a model that takes images has settings for them"
        pixels = self._send(tile).permute(2, 0, 1)
        planes = pixels.new_empty((1, *pixels.shape), dtype=table.dtype)
        for color in range(3):  # one by one: an index takes eight times the memory of a byte
            planes[0, color] = table[color][pixels[color].long()]
        return planes

    def find(self, plan: StepPlan, inputs: StepInputs) -> list[FoundEmbeds]:
        """Return the embeddings of a step's tokens, in the tower's width."""
        return [
            (place.tokens, self._by_number[place.number][place.embeds])
            for place in item_places(plan, inputs.first_tokens)
        ]

    @property
    def workspace_bytes(self) -> int:
        """The memory of all embeddings."""
        return sum(each.nbytes for each in self._by_number.values())

    def drop_workspace(self) -> None:
        """Forget all embeddings. Nothing uses them any more."""
        self._by_number.clear()


def make_item_embeds(loaded: LoadedModel, send: Send = torch.tensor) -> ItemEmbeds:
    """Make what keeps the embeddings of a model's images.

    Args:
        loaded: the model.
        send: see `ItemEmbeds`.

    Raises:
        EngineStartError: the model's directory does not say how images are prepared.
    """
    tower = getattr(loaded.model, "vision", None)
    if tower is None:
        return ItemEmbeds(None, None)
    settings = read_image_settings(Path(loaded.load.directory))
    if settings is None:
        raise EngineStartError(
            f"{loaded.load.directory} has no settings for images: copy processor_config.json or "
            "preprocessor_config.json of the model into it, or pass language_model_only=True"
        )
    return ItemEmbeds(tower, send(pixel_table(settings)).to(tower.dtype), send)


def item_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return about the most memory that the embeddings of images take, and a tower that computes
    those of the largest image, or tile."""
    model, vision = loaded.config, loaded.config.vision
    if vision is None:
        return 0
    most, size = image_info(config, model, loaded.max_model_len).most_embeds, vision.patch_size
    kept = most * (1 + vision.num_levels) * model.hidden_size
    patches = (vision.tile_size // size) ** 2 or most * vision.merge_size**2
    computed = patches * (vision.most_activations + 3 * size**2)
    return (kept + computed) * loaded.dtype.itemsize + patches * 3 * size**2


def check_item(item: Item, vision: VisionSpec) -> None:
    """Check that an image is what a tower takes.

    Raises:
        RequestError: its pixels or its number of embeddings are not those of its grid.
    """
    tiles, rows, columns = item.grid
    if vision.tile_size:
        expected = (tiles, vision.tile_size, vision.tile_size, 3)
    else:
        expected = (tiles, rows * vision.patch_size, columns * vision.patch_size, 3)
    merge = vision.merge_size or 1
    is_divided = tiles > 0 and not (rows % merge or columns % merge)
    if vision.merge_size and (tiles > 1 or len(item.spans) > 1):
        raise RequestError(
            f"an image of the model has one frame and lies in one piece, not {tiles} and "
            f"{len(item.spans)}"
        )
    count = vision.num_embeddings(item.grid)
    if not is_divided or item.pixels.shape != expected or item.num_embeds != count or not count:
        raise RequestError(
            f"an image of grid {item.grid} has pixels of shape {item.pixels.shape} and "
            f"{item.num_embeds} embeddings instead of {expected} and {count}"
        )


def spread_levels(levels: Tensor, found: Sequence[FoundEmbeds], num_tokens: int) -> None:
    """Write what images add behind the first layers, and zeros for all other tokens.

    Args:
        levels: [levels, tokens or more, hidden], where it goes.
        found: the result of `ItemEmbeds.find`, [n, (1 + levels) * hidden] each.
        num_tokens: the number of the step's tokens.
    """
    hidden = levels.shape[2]
    levels[:, :num_tokens] = 0
    for tokens, rows in found:
        parts = rows[:, hidden:].unflatten(1, (len(levels), hidden))
        levels[:, tokens] = parts.transpose(0, 1).to(levels.dtype)
