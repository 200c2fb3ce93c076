from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc import layout
from shmllm.ipc.client_bell import bell_of, name_bell
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind


@pytest.fixture
def bell(nothing_left_behind: None) -> Iterator[Segment]:
    with Segment.create(SegmentKind.CLIENT) as segment:
        yield segment


def test_a_segment_has_its_own_bell_at_first(client: Segment) -> None:
    assert bell_of(client) is None


def test_a_segment_names_the_bell_of_another(client: Segment, bell: Segment) -> None:
    name_bell(client, bell, "engine.17")
    assert bell_of(client) == (bell.nonce, "engine.17")
    assert bell_of(bell) is None


def test_the_longest_name_fits(client: Segment, bell: Segment) -> None:
    name = "x" * layout.CLIENT_BELL_NAME_BYTES
    name_bell(client, bell, name)
    assert bell_of(client) == (bell.nonce, name)


def test_a_damaged_name_is_refused(client: Segment, bell: Segment) -> None:
    name_bell(client, bell, "engine.1")
    client.buffer[layout.CLIENT_BELL_NAME_OFFSET] = 0xFF
    with pytest.raises(ProtocolMismatchError, match="is no name of a segment"):
        bell_of(client)
