"""How an engine gets a region: it adopts one whose owner has ended, or makes one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shmllm.errors import NoSpaceError, ProtocolMismatchError, SegmentError
from shmllm.shared_kv.collecting import collect_one
from shmllm.shared_kv.folder import places, region_path
from shmllm.shared_kv.layout import NUM_PLACES, RegionLayout
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import adopt, create, remove

ATTEMPTS = 20


def join(folder: Path, layout: RegionLayout) -> OwnRegion:
    """Return a region of a folder that this process owns from now on.

    Args:
        folder: the folder.
        layout: the layout that it needs.

    Raises:
        NoSpaceError: shared memory is full, also without the regions that nobody uses.
        SegmentError: the folder has as many regions as it can have, or the layout has no block.
    """
    if not layout.data_bytes:
        raise SegmentError("shared_kv_cache_bytes has no room for a block")
    attempts = ATTEMPTS
    while attempts:
        region = _adopt_any(folder, layout)
        if region is not None:
            return region
        try:
            region = _create_any(folder, layout)
        except FileNotFoundError:
            folder.mkdir(0o700, exist_ok=True)  # it was empty, and somebody has removed it
            attempts -= 1
            continue
        except NoSpaceError:
            if not collect_one(folder):
                raise
            continue
        if region is not None:
            return region
        raise SegmentError(
            f"{folder} has {NUM_PLACES} regions, which is the most; remove those of engines "
            "that have ended with: shmllm kv clear"
        )
    raise SegmentError(f"{folder}: somebody removes it again and again")


def _adopt_any(folder: Path, layout: RegionLayout) -> OwnRegion | None:
    """Adopt a region, and remove damaged ones whose owners have ended, which nobody else would."""
    for place in sorted(places(folder)):
        path = region_path(folder, place)
        try:
            region = adopt(path, place, layout)
        except FileNotFoundError:
            continue
        except ProtocolMismatchError:
            remove(path)
            continue
        if region is not None:
            return region
    return None


def _create_any(folder: Path, layout: RegionLayout) -> OwnRegion | None:
    """Make a region at the first place that is free; None: there is none."""
    for place in range(NUM_PLACES):
        path = region_path(folder, place)
        if not os.path.lexists(path):
            with suppress(FileExistsError):  # another engine takes the place at this moment
                return create(path, place, layout)
    return None
