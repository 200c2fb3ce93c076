"""Prefix caches that engines share: tests remove them, because they outlive their engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shmllm.shared_kv.folder import folders, places, region_path, remove_if_empty
from shmllm.shared_kv.region import remove


@contextmanager
def removing_regions() -> Iterator[None]:
    """Remove the regions of all engines that have ended, after the block and before it."""
    remove_regions()
    try:
        yield
    finally:
        remove_regions()


def remove_regions() -> None:
    """Remove the regions of all engines that have ended."""
    for folder in folders():
        for place in places(folder):
            remove(region_path(folder, place))
        remove_if_empty(folder)
