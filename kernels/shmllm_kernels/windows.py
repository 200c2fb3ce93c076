"""Where the keys that a token attends to begin. Front ends import this module, so it must import no
torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """A token attends to the positions of its own chunk, up to its own.

    Attributes:
        size: the number of positions in a chunk; the first one begins at position 0.
    """

    size: int


Window = int | Chunk
"""The number of positions up to its own that a token attends to, or the chunk that they are in."""


def window_number(window: Window | None) -> int:
    """Returns a window as kernels take it: the size of a chunk is negated, and 0 is none."""
    if isinstance(window, Chunk):
        return -window.size
    return window or 0
