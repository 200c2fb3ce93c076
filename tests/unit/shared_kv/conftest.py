"""A folder of regions in shared memory for one test, with nothing left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.shared_regions import Member

from shmllm.shared_kv.folder import make_folder

KEY = "0123456789abcdef"


@pytest.fixture
def root(own_regions: Path) -> Iterator[Path]:
    """The directory of all regions. No descriptor stays."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield own_regions
    gc.collect()  # tracebacks that pytest keeps may have references
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor is left"


@pytest.fixture
def folder(root: Path) -> Path:
    """The folder of a key."""
    return make_folder(KEY)


@pytest.fixture
def join_folder(folder: Path) -> Iterator[Callable[..., Member]]:
    """Makes engines of the folder, at a place or with a region. They end with the test."""
    members: list[Member] = []

    def make(region: Any, *arguments: Any) -> Member:
        members.append(
            Member(folder / str(region) if isinstance(region, int) else region, *arguments)
        )
        return members[-1]

    yield make
    for member in members:
        member.close()
