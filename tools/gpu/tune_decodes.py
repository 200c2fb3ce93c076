"""Searches for tile sizes of the attention of many decodes, which is most of such a step's time."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.search import Search
from gpu.settings import Settings
from gpu.tune import DECODED, REHEARSED_HEADS, search_of


def searches(settings: Settings) -> Iterator[Search]:
    for dim in REHEARSED_HEADS if settings.rehearsal else DECODED:
        yield search_of(settings, "decode", dim)
