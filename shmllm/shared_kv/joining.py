"""How an engine gets a region: it adopts one whose owner has ended, or makes one."""

from __future__ import annotations

import os
from pathlib import Path

from shmllm.errors import NoSpaceError, ProtocolMismatchError, SegmentError
from shmllm.shared_kv.collecting import collect_one, unused_bytes
from shmllm.shared_kv.folder import places, region_path
from shmllm.shared_kv.layout import NUM_PLACES, RegionLayout
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import adopt, create, remove

ATTEMPTS = 20


def join(folder: Path, layout: RegionLayout) -> OwnRegion:
    """Return a region of a folder that this process owns from now on.

    Args:
        folder: the folder.
        layout: the layout that it needs. Where there is no room for it, a region of another size
            does.

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
            return create(folder, layout)
        except FileExistsError as problem:
            raise SegmentError(
                f"{folder} has {NUM_PLACES} regions, which is the most; remove those of engines "
                "that have ended with: shmllm kv clear"
            ) from problem
        except FileNotFoundError:
            folder.mkdir(0o700, exist_ok=True)  # it was empty, and somebody has removed it
            attempts -= 1
        except NoSpaceError:
            if _can_make_room(folder, layout) and collect_one(folder):
                continue
            region = _adopt_any(folder, layout, is_any_size=True)
            if region is None:
                raise
            return region
    raise SegmentError(f"{folder}: somebody removes it again and again")


def _can_make_room(folder: Path, layout: RegionLayout) -> bool:
    """Whether there is room for a region without those, of other folders, that nobody uses."""
    space = os.statvfs(folder)
    return layout.data_bytes < space.f_bavail * space.f_frsize + unused_bytes(folder)


def _adopt_any(folder: Path, layout: RegionLayout, is_any_size: bool = False) -> OwnRegion | None:
    """Adopt a region, and remove damaged ones whose owners have ended, which nobody else would.

    Args:
        folder: the folder.
        layout: the layout that it has to have.
        is_any_size: whether only the shape of its blocks has to be that of the layout.
    """
    for place in sorted(places(folder)):
        path = region_path(folder, place)
        try:
            region = adopt(path, place, layout, is_any_size)
        except FileNotFoundError:
            continue
        except ProtocolMismatchError:
            remove(path)
            continue
        if region is not None:
            return region
    return None
