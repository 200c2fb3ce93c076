"""What becomes of a model's items of one kind, and of prompts with them.

A processor joins how items are prepared, which is the subclass's, with the placeholder of the
model's architecture. It must not know where items come from and how they reach the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.given_embeds import GivenEmbeds, name_of
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders import expansion
from shmllm.frontend.placeholders.expansion import Encode, Runs
from shmllm.frontend.placeholders.family import Placeholder
from shmllm.frontend.prompt_embeds import as_float32, read_embeds
from shmllm.params.items import COUNTED, Grid

Opened = TypeVar("Opened")
"""An item that has been decoded."""

NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


class ItemProcessor(ABC, Generic[Opened]):
    """Prepares items and prompts for one model. Threads may share it.

    Args:
        placeholder: what stands for an item in a prompt.

    Attributes:
        mark: what users and chat templates write for an item.
        token_id: the id of the token at whose positions the embeddings are.
        token_alone: the same of a model whose prompts have one item and no text; None: others.
    """

    def __init__(self, placeholder: Placeholder) -> None:
        self.mark = placeholder.mark
        self.token_id = placeholder.token_id
        self.token_alone = placeholder.token_id if placeholder.is_alone else None
        self._placeholder = placeholder

    @classmethod
    @abstractmethod
    def of_model(cls, directory: Path, placeholder: Any) -> Self:
        """The processor of a model.

        Args:
            directory: the model's directory.
            placeholder: that of its architecture, of the modality's own class.

        Raises:
            EngineStartError: a file is missing or wrong, or its settings are not supported.
        """

    @property
    @abstractmethod
    def known_overrides(self) -> frozenset[str]:
        """The names in `mm_processor_kwargs` that have a meaning for these items."""

    def among(self, count: int) -> Mapping[str, Any]:
        """The overrides that a prompt with so many items has of itself. Those of a request take
        their place."""
        return NO_OVERRIDES

    def check(self, overrides: Mapping[str, Any]) -> None:
        """Checks that items suit the model, as far as that does not depend on the item.

        Args:
            overrides: those of the engine's option `mm_processor_kwargs`.

        Raises:
            EngineStartError: no item does.
            RequestError: an override is unknown or wrong.
        """

    @abstractmethod
    def open(self, name: str, value: Any) -> Opened:
        """Decodes what a user gives.

        Args:
            name: the item's name for messages, such as "prompt 3: image 1".
            value: what the modality's `opening` module takes.

        Raises:
            RequestError: it is something else, or damaged.
        """

    @abstractmethod
    def size(self, opened: Opened) -> tuple[int, ...]:
        """The size of an item: what tells apart items of one name without reading them."""

    @abstractmethod
    def identity(
        self, opened: Opened, overrides: Mapping[str, Any] = NO_OVERRIDES, name: str = "the item"
    ) -> bytes:
        """32 bytes: equal ones mean equal data, grids and inputs of the tower.

        Args:
            opened: the item.
            overrides: vLLM's `mm_processor_kwargs`. Those without an effect make no difference.
            name: the item's name for messages.

        Raises:
            RequestError: an override is unknown or wrong.
        """

    @abstractmethod
    def prepare(
        self, opened: Opened, overrides: Mapping[str, Any] = NO_OVERRIDES, name: str = "the item"
    ) -> PreparedItem:
        """Makes of an item what the engine needs. Arguments are those of `identity`.

        Raises:
            RequestError: an override is unknown or wrong, or the item does not suit the model.
        """

    def take_embeds(self, name: str, given: GivenEmbeds, width: int) -> PreparedItem:
        """Makes of the embeddings of an item what the engine needs.

        Args:
            name: the item's name for messages.
            given: what the user gives.
            width: the number of values of an embedding.

        Raises:
            RequestError: it is something else, or not as many embeddings as its grid has, or the
                model's prompts need more than that.
        """
        own = self._placeholder
        key = name_of(own.modality)
        rows = read_embeds(name, given.rows, width, repr(key))
        if not len(rows):
            raise RequestError(f"{name} has no embeddings")
        data = np.array(as_float32(rows), np.float32, order="C")
        data.flags.writeable = False
        grid = self._grid_of(name, key, given, len(data))
        return PreparedItem(data, grid, len(data), given.frame_seconds, is_embeds=True)

    def _grid_of(self, name: str, key: str, given: GivenEmbeds, count: int) -> Grid:
        own, grid = self._placeholder, given.grid
        if own.EMBEDS is None:
            raise RequestError(
                f"{name}: a prompt of this model says more of {COUNTED[own.modality]} than how "
                f"many embeddings they have, so {key!r} cannot be given: pass the {own.modality}"
            )
        table = f"{own.modality}_grid_thw"
        if own.EMBEDS == "nothing":
            if grid is not None:
                raise RequestError(f"{name}: the model needs no {table!r}: leave it out")
            return 1, 1, 1
        if grid is None:
            raise RequestError(
                f"{name}: the model needs the grid of embeddings: pass "
                f'{{"{key}": ..., "{table}": ...}}'
            )
        if own.count(grid) != count:
            raise RequestError(
                f"{name} has {count:,} embeddings, and its grid {list(grid)} {own.count(grid):,}"
            )
        return grid

    def complete(self, text: str, count: int) -> str | None:
        """See `Placeholder.complete`."""
        return self._placeholder.complete(text, count)

    def expand_text(self, name: str, text: str, items: Sequence[PreparedItem]) -> str:
        """The text of a prompt with each mark replaced by what stands for its item.

        Raises:
            RequestError: the numbers of marks and items differ.
        """
        return expansion.expand_text(name, self._placeholder, text, items)

    def expand_ids(
        self, name: str, ids: Sequence[int], items: Sequence[PreparedItem], encode: Encode
    ) -> list[int]:
        """The token ids of a prompt with each mark replaced by the ids of its item's expansion.
        Ids that contain the tokens of all embeddings already stay as they are.

        Args:
            name: the prompt's name for messages.
            ids: the token ids.
            items: in the order of their marks.
            encode: makes token ids of a text, without special tokens around it.

        Raises:
            RequestError: the ids have neither a mark for each item nor all tokens.
        """
        return expansion.expand_ids(name, self._placeholder, ids, items, encode)

    def runs(self, name: str, ids: Sequence[int], items: Sequence[PreparedItem]) -> list[Runs]:
        """Of each item the positions of its embeddings in the expanded prompt: ascending half-open
        intervals, together as long as its `num_tokens`.

        Raises:
            RequestError: the prompt has more or fewer tokens than its items have embeddings.
        """
        counts = [each.num_tokens for each in items]
        return expansion.find_runs(name, self._placeholder, ids, counts)
