"""How an engine gets a region: it adopts one whose owner has ended, or makes one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shmllm.errors import NoSpaceError, ProtocolMismatchError, SegmentError
from shmllm.shared_kv.collecting import collect_one
from shmllm.shared_kv.folder import places, region_path
from shmllm.shared_kv.layout import NUM_PLACES, RegionLayout
from shmllm.shared_kv.region import OwnRegion, adopt, create

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
    for _ in range(ATTEMPTS):
        taken = places(folder)
        for place in taken:
            with suppress(FileNotFoundError, ProtocolMismatchError):
                region = adopt(region_path(folder, place), place, layout)
                if region is not None:
                    return region
        free = [place for place in range(NUM_PLACES) if place not in taken]
        if not free:
            raise SegmentError(
                f"{folder} has {NUM_PLACES} regions, which is the most; remove those of engines "
                "that have ended with: shmllm kv clear"
            )
        try:
            return create(region_path(folder, free[0]), free[0], layout)
        except FileExistsError:
            continue  # another engine has taken the place meanwhile
        except FileNotFoundError:
            folder.mkdir(0o700, exist_ok=True)  # it was empty, and somebody has removed it
        except NoSpaceError:
            if not collect_one(folder):
                raise
    raise SegmentError(f"{folder}: other engines take every place")
