"""A ring looked at from outside: for tools, and after a death."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.ipc.layout import PADDING_KIND, RECORD_HEADER, RingLayout
from shmllm.ipc.ring import parts_of, record_span


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Header of a record that lies in a ring."""

    position: int
    kind: int
    length: int


@dataclass(frozen=True, slots=True)
class RingState:
    """What stands in a ring, looked at from outside.

    Attributes:
        records: the latest unread ones, padding left out.
    """

    published: int
    consumed: int
    records: tuple[RecordHeader, ...]

    @property
    def used_bytes(self) -> int:
        return self.published - self.consumed


def peek(buffer: memoryview, layout: RingLayout, num_records: int) -> RingState:
    """Look at a ring without being one of its ends, for a post-mortem. Of a ring in use it
    sees some moment, and stops at the first header that makes no sense."""
    data, published_word, consumed_word = parts_of(buffer, layout)
    with data:
        consumed, published = consumed_word.load(), published_word.load()
        published_word.close()
        consumed_word.close()
        headers: list[RecordHeader] = []
        position = consumed
        while position < published <= consumed + len(data):
            index = position & (len(data) - 1)
            length, kind, _, sequence = RECORD_HEADER.unpack_from(data, index)
            if sequence != position:
                break
            if kind != PADDING_KIND:
                headers.append(RecordHeader(position, kind, length))
            position += record_span(length)
    return RingState(published, consumed, tuple(headers[-num_records:] if num_records else ()))
