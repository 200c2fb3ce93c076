"""The layout of shared memory: offsets, sizes, formats, magic number and version.

This module holds numbers and no behaviour. No other module may contain an offset. All integers
are little-endian. A *word* is an aligned u64 that only one process writes during its whole life.
The creator writes its fields before the segment becomes valid, and nobody writes them again.
Every other word begins as zero, as a new file does, so no process initialises a word for another.
Only DOORBELL_POSTED has several writers: those that post set it, and the one that waits clears it.

Header, the first line of every segment (the creator stores the version last, and the magic number
just before it):

    +--------+--------------------------+-----------+--------------------------------+
    | offset | field                    | writer    | meaning                        |
    +--------+--------------------------+-----------+--------------------------------+
    | 0x0000 | MAGIC                    | creator   | "shmllm01"                     |
    | 0x0008 | VERSION                  | creator   | PROTOCOL_VERSION               |
    | 0x0010 | KIND                     | creator   | SegmentKind                    |
    | 0x0018 | SIZE                     | creator   | length of the file in bytes    |
    | 0x0020 | NONCE                    | creator   | random multiple of NONCE_STEP  |
    | 0x0028 | CREATOR_PID              | creator   | in its own pid namespace       |
    | 0x0030 | CREATOR_PID_NAMESPACE    | creator   | inode of /proc/self/ns/pid     |
    +--------+--------------------------+-----------+--------------------------------+

CONTROL segment: one per engine; all of its front ends read it.

    +--------+--------------------------+-----------+--------------------------------+
    | 0x0000 | HEADER                   | creator   | see above                      |
    | 0x0080 | CONTROL_STATE            | engine    | EngineState                    |
    | 0x0088 | CONTROL_ENGINE_PID       | engine    | 0 until the engine attached    |
    | 0x0090 | CONTROL_ENGINE_PID_NS    | engine    | inode of its pid namespace     |
    | 0x0098 | CONTROL_MARKS            | engine    | 3 words, indexed by Mark       |
    | 0x0100 | CONTROL_HEARTBEAT        | engine    | CLOCK_MONOTONIC, ns            |
    | 0x0180 | CONTROL_PARKED           | engine    | Parked                         |
    | 0x1000 | CONTROL_STATS            | engine    | 480 words, indexed by Stat     |
    | 0x1f00 | CONTROL_ACCEPTED_AT      | engine    | 32 words, by place in a draft  |
    | 0x2000 | CONTROL_LAST_WORDS_SIZE  | engine    | bytes of text that are valid   |
    | 0x2080 | CONTROL_LAST_WORDS       | engine    | 16 KiB UTF-8, cause of death   |
    | 0x6100 | CONTROL_DEVICE           | engine    | 128 bytes UTF-8, NUL-padded    |
    | 0x6180 | CONTROL_MODEL            | engine    | 128 bytes UTF-8, NUL-padded    |
    | 0x6200 | CONTROL_ANSWER           | engine    | word k: that nonce + Answer    |
    | 0x6300 | CONTROL_PRECISION        | engine    | 128 bytes UTF-8, NUL-padded    |
    | 0x6380 | CONTROL_SPECULATION      | engine    | 128 bytes UTF-8, NUL-padded    |
    | 0x7000 | CONTROL_HELLO            | client k  | word k: nonce of that client   |
    | 0x7100 | CONTROL_DOORBELL         | both      | posted by clients              |
    | 0x8000 | CONTROL_HISTOGRAMS       | engine    | 8 of 256 words, by Histogram   |
    | 0xc000 | CONTROL_STEP_COUNT       | engine    | number of logged steps         |
    | 0xd000 | CONTROL_STOP             | operator  | 0, or 1 + drain time in ms     |
    | 0x10000 | CONTROL_STEP_RECORDS    | engine    | 1,024 records of 128 bytes     |
    | 0x30000 | CONTROL_ERRORS          | engine    | 64 entries of 512 bytes        |
    | 0x38000 | CONTROL_END             |           |                                |
    +--------+--------------------------+-----------+--------------------------------+

Access by role: a front end maps the segment read-only, and the page from CONTROL_HELLO to 0x8000 a
second time, writable. Only `shmllm engine stop`, the operator, maps CONTROL_STOP's page writable.

Entry of the error log, relative to CONTROL_ERRORS plus index * 0x200. Times are ns since 1970:

    +--------+--------------------------+-----------+--------------------------------+
    | +0x000 | ERROR_COUNT              | engine    | 0: free; stored last           |
    | +0x008 | ERROR_FIRST              | engine    | time of the first occurrence   |
    | +0x010 | ERROR_LAST               | engine    | time of the last occurrence    |
    | +0x018 | ERROR_TEXT_SIZE          | engine    | bytes of text that are valid   |
    | +0x020 | ERROR_TEXT               | engine    | 480 bytes UTF-8                |
    +--------+--------------------------+-----------+--------------------------------+

Histogram, relative to CONTROL_HISTOGRAMS plus index * 0x800 (`histogram.py` has the bounds):

    +--------+--------------------------+-----------+--------------------------------+
    | +0x000 | HISTOGRAM_COUNTS         | engine    | 255 words, one for each bucket |
    | +0x7f8 | HISTOGRAM_SUM            | engine    | sum of all durations, ns       |
    +--------+--------------------------+-----------+--------------------------------+

Step record: words in the order of StepField.

CLIENT segment: one per front end, which the diagrams call client. Its creation allocates the memory
before REQUEST_SMALL_SLOTS. From there on the file has a hole, which costs address space only, until
a slot is used. The large slots, which are almost the whole size, come last.

    +-------------+----------------------+----------+--------------------------------+
    | 0x000000000 | HEADER               | creator  | see above                      |
    | 0x000000080 | CLIENT_STATE         | client   | ClientState                    |
    | 0x000000088 | CLIENT_HEARTBEAT     | client   | CLOCK_MONOTONIC, ns            |
    | 0x000000090 | CLIENT_BELL          | client   | 0, or the nonce of the segment |
    |             |                      |          | whose PARKED and DOORBELL the  |
    |             |                      |          | client waits on                |
    | 0x000000098 | CLIENT_BELL_NAME     | client   | 96 bytes: its name in the same |
    |             |                      |          | folder, if it has one          |
    | 0x000000100 | CLIENT_PARKED        | client   | Parked                         |
    | 0x000000180 | CLIENT_DOORBELL      | both     | posted by the engine           |
    | 0x000000200 | REQUEST_PUBLISHED    | client   | position                       |
    | 0x000000280 | REQUEST_CONSUMED     | engine   | position                       |
    | 0x000000300 | OUTPUT_PUBLISHED     | engine   | position                       |
    | 0x000000308 | OUTPUT_URGENT        | engine   | end of the last urgent record  |
    | 0x000000380 | OUTPUT_CONSUMED      | client   | position                       |
    | 0x000000400 | REQUEST_WRITER_STATS | client   | 5 words of RingStatistics      |
    | 0x000000480 | REQUEST_READER_STATS | engine   | the same                       |
    | 0x000000500 | OUTPUT_WRITER_STATS  | engine   | the same                       |
    | 0x000000580 | OUTPUT_READER_STATS  | client   | the same                       |
    | 0x000001000 | REQUEST_SLOT_TABLE   | both     | 26 slot entries, see below     |
    | 0x000003000 | OUTPUT_SLOT_TABLE    | both     | 26 slot entries                |
    | 0x000005000 | REQUEST_RING         | client   | 512 KiB of records             |
    | 0x000085000 | OUTPUT_RING          | engine   | 512 KiB of records             |
    | 0x000105000 | REQUEST_SMALL_SLOTS  | client   | slots 0 to 15, 256 KiB each    |
    | 0x000505000 | OUTPUT_SMALL_SLOTS   | engine   | the same                       |
    | 0x000905000 | REQUEST_MEDIUM_SLOTS | client   | slots 16 to 23, 4 MiB each     |
    | 0x002905000 | OUTPUT_MEDIUM_SLOTS  | engine   | the same                       |
    | 0x004905000 | REQUEST_LARGE_SLOTS  | client   | slots 24 and 25, 2 GiB each    |
    | 0x104905000 | OUTPUT_LARGE_SLOTS   | engine   | the same                       |
    | 0x204905000 | CLIENT_END           |          |                                |
    +-------------+----------------------+----------+--------------------------------+

Slot entry, relative to the table plus index * 0x100. The reader holds a slot while the two counts
differ:

    +--------+--------------------------+-----------+--------------------------------+
    | +0x000 | SLOT_PUBLISHED           | writer    | number of publications         |
    | +0x008 | SLOT_PAYLOAD             | writer    | bytes of the last publication  |
    | +0x010 | SLOT_CLAIMED_AT          | writer    | CLOCK_MONOTONIC, ns; 0: free   |
    | +0x018 | SLOT_PUBLISHED_AT        | writer    | CLOCK_MONOTONIC, ns            |
    | +0x080 | SLOT_RELEASED            | reader    | number of releases             |
    +--------+--------------------------+-----------+--------------------------------+

Doorbell, relative to its offset:

    +--------+--------------------------+-----------+--------------------------------+
    | +0x000 | DOORBELL_KIND            | creator   | DoorbellKind                   |
    | +0x010 | DOORBELL_POSTED          | both      | 0: no post is pending          |
    | +0x040 | DOORBELL_NAME            | creator   | 64 bytes, NUL-padded           |
    +--------+--------------------------+-----------+--------------------------------+

Record in a ring, aligned to 16 bytes. It never wraps: PADDING fills an end that is too short.

    +--------+--------------------------+-----------+--------------------------------+
    | +0x000 | payload length           | u32       | without header and alignment   |
    | +0x004 | kind                     | u16       | 0xFFFF is PADDING              |
    | +0x006 | flags                    | u16       | zero                           |
    | +0x008 | sequence                 | u64       | this record's own position     |
    | +0x010 | payload                  | bytes     |                                |
    +--------+--------------------------+-----------+--------------------------------+
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shmllm.ipc.states import SegmentKind

MAGIC = int.from_bytes(b"shmllm01", "little")
PROTOCOL_VERSION = 14

WORD_BYTES = 8
LINE_BYTES = 128
PAGE_BYTES = 4096

MAGIC_OFFSET = 0x0000
VERSION_OFFSET = 0x0008
KIND_OFFSET = 0x0010
SIZE_OFFSET = 0x0018
NONCE_OFFSET = 0x0020
CREATOR_PID_OFFSET = 0x0028
CREATOR_PID_NAMESPACE_OFFSET = 0x0030
HEADER_OFFSET = 0x0000

CONTROL_STATE_OFFSET = 0x0080
CONTROL_ENGINE_PID_OFFSET = 0x0088
CONTROL_ENGINE_PID_NS_OFFSET = 0x0090
CONTROL_MARKS_OFFSET = 0x0098
CONTROL_HEARTBEAT_OFFSET = 0x0100
CONTROL_PARKED_OFFSET = 0x0180
CONTROL_STATS_OFFSET = 0x1000
CONTROL_ACCEPTED_AT_OFFSET = 0x1F00
CONTROL_LAST_WORDS_SIZE_OFFSET = 0x2000
CONTROL_LAST_WORDS_OFFSET = 0x2080
CONTROL_DEVICE_OFFSET = 0x6100
CONTROL_MODEL_OFFSET = 0x6180
CONTROL_ANSWER_OFFSET = 0x6200
CONTROL_PRECISION_OFFSET = 0x6300
CONTROL_SPECULATION_OFFSET = 0x6380
CONTROL_HELLO_OFFSET = 0x7000
CONTROL_DOORBELL_OFFSET = 0x7100
CONTROL_HISTOGRAMS_OFFSET = 0x8000
CONTROL_STEP_COUNT_OFFSET = 0xC000
CONTROL_STOP_OFFSET = 0xD000
CONTROL_STEP_RECORDS_OFFSET = 0x10000
CONTROL_ERRORS_OFFSET = 0x30000
CONTROL_END_OFFSET = 0x38000
NUM_CLIENTS = 32
NONCE_STEP = 8
NUM_STAT_WORDS = 480
NUM_DRAFT_PLACES = 32
LAST_WORDS_BYTES = 16 * 1024
NAME_BYTES = 128
NUM_HISTOGRAMS = 8
HISTOGRAM_COUNTS_OFFSET = 0x000
HISTOGRAM_SUM_OFFSET = 0x7F8
HISTOGRAM_WORDS = 256
HISTOGRAM_BUCKETS = 255
NUM_STEP_RECORDS = 1024
STEP_RECORD_BYTES = 128
NUM_ERRORS = 64
ERROR_COUNT_OFFSET = 0x000
ERROR_FIRST_OFFSET = 0x008
ERROR_LAST_OFFSET = 0x010
ERROR_TEXT_SIZE_OFFSET = 0x018
ERROR_TEXT_OFFSET = 0x020
ERROR_ENTRY_BYTES = 512
ERROR_TEXT_BYTES = 480

CLIENT_STATE_OFFSET = 0x0080
CLIENT_HEARTBEAT_OFFSET = 0x0088
CLIENT_BELL_OFFSET = 0x0090
CLIENT_BELL_NAME_OFFSET = 0x0098
CLIENT_BELL_NAME_BYTES = 96
CLIENT_PARKED_OFFSET = 0x0100
CLIENT_DOORBELL_OFFSET = 0x0180
REQUEST_PUBLISHED_OFFSET = 0x0200
REQUEST_CONSUMED_OFFSET = 0x0280
OUTPUT_PUBLISHED_OFFSET = 0x0300
OUTPUT_URGENT_OFFSET = 0x0308
OUTPUT_CONSUMED_OFFSET = 0x0380
REQUEST_WRITER_STATS_OFFSET = 0x0400
REQUEST_READER_STATS_OFFSET = 0x0480
OUTPUT_WRITER_STATS_OFFSET = 0x0500
OUTPUT_READER_STATS_OFFSET = 0x0580
REQUEST_SLOT_TABLE_OFFSET = 0x1000
OUTPUT_SLOT_TABLE_OFFSET = 0x3000
REQUEST_RING_OFFSET = 0x5000
OUTPUT_RING_OFFSET = 0x85000
REQUEST_SMALL_SLOTS_OFFSET = 0x105000
OUTPUT_SMALL_SLOTS_OFFSET = 0x505000
REQUEST_MEDIUM_SLOTS_OFFSET = 0x905000
OUTPUT_MEDIUM_SLOTS_OFFSET = 0x2905000
REQUEST_LARGE_SLOTS_OFFSET = 0x4905000
OUTPUT_LARGE_SLOTS_OFFSET = 0x104905000
CLIENT_END_OFFSET = 0x204905000

SLOT_PUBLISHED_OFFSET = 0x000
SLOT_PAYLOAD_OFFSET = 0x008
SLOT_CLAIMED_AT_OFFSET = 0x010
SLOT_PUBLISHED_AT_OFFSET = 0x018
SLOT_RELEASED_OFFSET = 0x080
SLOT_ENTRY_BYTES = 0x100
NUM_SMALL_SLOTS = 16
NUM_MEDIUM_SLOTS = 8
NUM_LARGE_SLOTS = 2
NUM_SLOTS = NUM_SMALL_SLOTS + NUM_MEDIUM_SLOTS + NUM_LARGE_SLOTS
SMALL_SLOT_BYTES = 256 * 1024
MEDIUM_SLOT_BYTES = 4 * 1024 * 1024
LARGE_SLOT_BYTES = 2 * 1024 * 1024 * 1024
LARGE_SLOT_KEPT_BYTES = 32 * 1024 * 1024
SLOT_PAGES_STEP_BYTES = 256 * 1024

DOORBELL_KIND_OFFSET = 0x000
DOORBELL_POSTED_OFFSET = 0x010
DOORBELL_NAME_OFFSET = 0x040
DOORBELL_NAME_BYTES = 64
DOORBELL_BYTES = 128

RING_BYTES = 512 * 1024
RECORD_HEADER = struct.Struct("<IHHQ")
RECORD_HEADER_BYTES = 16
RECORD_ALIGNMENT = 16
PADDING_KIND = 0xFFFF

ALLOCATED_BYTES = {
    SegmentKind.CONTROL: CONTROL_END_OFFSET,
    SegmentKind.CLIENT: REQUEST_SMALL_SLOTS_OFFSET,
}
TOTAL_BYTES = {
    SegmentKind.CONTROL: CONTROL_END_OFFSET,
    SegmentKind.CLIENT: CLIENT_END_OFFSET,
}
DOORBELL_OFFSETS = {
    SegmentKind.CONTROL: CONTROL_DOORBELL_OFFSET,
    SegmentKind.CLIENT: CLIENT_DOORBELL_OFFSET,
}


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Byte offsets of one ring inside its segment; capacity is a power of two."""

    published_offset: int
    consumed_offset: int
    writer_stats_offset: int
    reader_stats_offset: int
    data_offset: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Adjacent tensor slots of one size.

    Attributes:
        data_offset: byte offset of the first slot in the segment.
        num_slots: the number of slots.
        slot_bytes: the address space of each slot; pages are allocated when a payload needs them.
        kept_bytes: the largest number of bytes that a free slot keeps allocated.
        takes_smaller: whether the writer may use these slots for payloads of the next smaller
            class while all slots of that class are taken.
    """

    data_offset: int
    num_slots: int
    slot_bytes: int
    kept_bytes: int
    takes_smaller: bool


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The tensor slots of one direction.

    Attributes:
        table_offset: byte offset of the table of slot entries.
        classes: the slot classes, smallest slots first. The index of a slot counts through all
            classes.
    """

    table_offset: int
    classes: tuple[SlotClass, ...]


REQUEST_RING_LAYOUT = RingLayout(
    REQUEST_PUBLISHED_OFFSET,
    REQUEST_CONSUMED_OFFSET,
    REQUEST_WRITER_STATS_OFFSET,
    REQUEST_READER_STATS_OFFSET,
    REQUEST_RING_OFFSET,
    RING_BYTES,
)
OUTPUT_RING_LAYOUT = RingLayout(
    OUTPUT_PUBLISHED_OFFSET,
    OUTPUT_CONSUMED_OFFSET,
    OUTPUT_WRITER_STATS_OFFSET,
    OUTPUT_READER_STATS_OFFSET,
    OUTPUT_RING_OFFSET,
    RING_BYTES,
)


def _slot_layout(table: int, small: int, medium: int, large: int) -> SlotLayout:
    classes = (
        SlotClass(small, NUM_SMALL_SLOTS, SMALL_SLOT_BYTES, SMALL_SLOT_BYTES, True),
        SlotClass(medium, NUM_MEDIUM_SLOTS, MEDIUM_SLOT_BYTES, MEDIUM_SLOT_BYTES, True),
        SlotClass(large, NUM_LARGE_SLOTS, LARGE_SLOT_BYTES, LARGE_SLOT_KEPT_BYTES, False),
    )
    return SlotLayout(table, classes)


REQUEST_SLOT_LAYOUT = _slot_layout(
    REQUEST_SLOT_TABLE_OFFSET,
    REQUEST_SMALL_SLOTS_OFFSET,
    REQUEST_MEDIUM_SLOTS_OFFSET,
    REQUEST_LARGE_SLOTS_OFFSET,
)
OUTPUT_SLOT_LAYOUT = _slot_layout(
    OUTPUT_SLOT_TABLE_OFFSET,
    OUTPUT_SMALL_SLOTS_OFFSET,
    OUTPUT_MEDIUM_SLOTS_OFFSET,
    OUTPUT_LARGE_SLOTS_OFFSET,
)
