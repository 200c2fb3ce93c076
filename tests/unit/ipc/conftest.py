"""Fixtures: segments for one test each, and a check that no test leaves files or descriptors."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from conftest import LEAK_GRACE_S, our_files
from support.waiting import holds_within

from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind


def _own_leftovers() -> set[str]:
    doorbells = {name for name in os.listdir("/dev/shm") if name.startswith("sem.shmllm")}
    return our_files() | doorbells


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    names_before = _own_leftovers()
    fds_before = len(os.listdir("/proc/self/fd"))
    yield
    # Files of a test session that runs at the same time disappear within this time.
    assert holds_within(lambda: _own_leftovers() <= names_before, LEAK_GRACE_S)
    # Tracebacks that pytest keeps reference views, and a view keeps the mapping's descriptor open.
    if len(os.listdir("/proc/self/fd")) > fds_before:
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds_before


@pytest.fixture
def control(nothing_left_behind: None) -> Iterator[Segment]:
    with Segment.create(SegmentKind.CONTROL) as segment:
        yield segment


@pytest.fixture
def client(nothing_left_behind: None) -> Iterator[Segment]:
    with Segment.create(SegmentKind.CLIENT) as segment:
        yield segment
