"""A process can store only into the pages of its role."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shmllm.ipc import layout
from shmllm.ipc.access import Access
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.control import ControlPage, ControlView
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Answer, SegmentKind
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word

WORDS = range(0, layout.CONTROL_END_OFFSET, layout.WORD_BYTES)
FRONT_END_PAGE = range(0x7000, 0x8000, layout.WORD_BYTES)
STOP_PAGE = range(0xD000, 0xE000, layout.WORD_BYTES)


@pytest.fixture
def control() -> Iterator[Segment]:
    with Segment.create(SegmentKind.CONTROL) as segment:
        yield segment


def is_writable(segment: Segment, offset: int) -> bool:
    return not segment.part(offset, layout.WORD_BYTES).readonly


@pytest.mark.skipif(os.sysconf("SC_PAGESIZE") != layout.PAGE_BYTES, reason="pages are larger")
@pytest.mark.parametrize(
    ("access", "writable"),
    [
        (Access.READER, []),
        (Access.FRONT_END, [*FRONT_END_PAGE]),
        (Access.OPERATOR, [*FRONT_END_PAGE, *STOP_PAGE]),
        (Access.ALL, [*WORDS]),
    ],
)
@pytest.mark.parametrize("is_restricted", [False, True], ids=["attached", "restricted"])
def test_each_role_has_its_pages(
    control: Segment, access: Access, writable: list[int], is_restricted: bool
) -> None:
    if is_restricted and access is Access.ALL:
        pytest.skip("the creator has all anyway")
    if is_restricted:
        control.restrict(access)
        segment = control
    else:
        fd = os.open(f"/proc/self/fd/{control.fd}", access.open_flags & ~os.O_NOFOLLOW)
        segment = Segment.attach(fd, SegmentKind.CONTROL, access)
    assert [offset for offset in WORDS if is_writable(segment, offset)] == writable
    assert segment.buffer.readonly == (access is not Access.ALL)
    segment.close()


def test_a_store_outside_of_the_role_raises_and_changes_nothing(control: Segment) -> None:
    with Segment.attach(os.dup(control.fd), SegmentKind.CONTROL, Access.FRONT_END) as segment:
        view = ControlView(segment)
        with pytest.raises(TypeError, match="read-only"):
            view.request_stop(0)
        view.close()
    assert Word(control.buffer, layout.CONTROL_STOP_OFFSET).load() == 0


def test_a_store_through_the_page_of_a_role_is_seen(control: Segment) -> None:
    page = ControlPage(control)
    with Segment.attach(os.dup(control.fd), SegmentKind.CONTROL, Access.OPERATOR) as segment:
        view = ControlView(segment)
        view.say_hello(3, 2**62)
        assert page.hellos()[3] == 2**62
        assert page.stop_request() is None
        view.request_stop(1.5)
        assert page.stop_request() == 1.5
        page.answer(3, 2**62, Answer.TOO_SLOW)
        assert view.answer(3, 2**62) is Answer.TOO_SLOW
        view.close()
    page.close()


def test_a_front_end_needs_no_more_than_its_page(control: Segment) -> None:
    with (
        Segment.create(SegmentKind.CLIENT) as client,
        Segment.attach(os.dup(control.fd), SegmentKind.CONTROL, Access.FRONT_END) as segment,
    ):
        channel = ClientChannel(segment, client, WaitPolicy.named("idle"))
        Word(control.buffer, layout.CONTROL_PARKED_OFFSET).store(1)
        channel.say_hello(0, client.nonce)
        assert channel.try_send(1, b"x")
        channel.close()


@pytest.mark.parametrize("answer", list(Answer))
def test_a_front_end_believes_only_answers_with_its_nonce(control: Segment, answer: Answer) -> None:
    page, view = ControlPage(control), ControlView(control)
    for other in (0, 2**62 - 8, 2**62 + 8, 2**64 - 1):
        page.answer(0, other, answer)
        assert view.answer(0, 2**62) is None
    page.answer(0, 2**62, answer)
    assert view.answer(0, 2**62) is answer
    page.close()
    view.close()
