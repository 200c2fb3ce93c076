"""The place of a process in a group that computes one model, and its part of the model.

The ranks of a tensor parallel group divide each layer; the stages of a pipeline divide the layers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a process in a group.

    Attributes:
        rank: its number, from 0.
        size: the number of ranks.
    """

    rank: int = 0
    size: int = 1

    def part_of(self, count: int) -> range:
        """Returns the rank's part of `count` consecutive items."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def find(self, own: int, count: int) -> range:
        """Returns which of `count` consecutive items the `own` ones of the rank are: all, its part,
        or, if there are fewer than ranks, some that it shares with others."""
        if own == count:
            return range(count)
        part = self.part_of(count)
        if len(part) == own:
            return part
        begin = self.rank * (count // own) // self.size * own
        return range(begin, begin + own)


WHOLE = Shard()
"""The place of a process that is no part of a group."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The place of a process in a pipeline.

    Attributes:
        index: its number, from 0.
        layers: the layers that it computes; None: all.
        is_last: whether it has the final norm and the LM head.
    """

    index: int = 0
    layers: range | None = None
    is_last: bool = True

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.index == 0

    def has(self, layer: int) -> bool:
        """Whether it computes a layer."""
        return self.layers is None or layer in self.layers


ONLY = Stage()
"""The place of a process that is no part of a pipeline."""
