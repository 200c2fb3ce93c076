"""Where every byte of shared memory lies: offsets, sizes, formats, magic, version.

Owns numbers only; there is no behaviour here, and no other module may spell an offset.
All integers are little-endian. A *word* is an aligned u64 with one writing process for its
whole life; "creator" fields are written before the segment is valid and never again. The
zero bytes of a fresh file are the initial value of every other word, so nobody has to
write a word on behalf of its owner. A doorbell is the exception that proves the rule: it
is changed by libc's atomic instructions from both sides.

Header, the first line of every segment (version is stored last, magic just before it):

    +--------+--------------------------+-----------+--------------------------------+
    | offset | field                    | writer    | meaning                        |
    +--------+--------------------------+-----------+--------------------------------+
    | 0x0000 | MAGIC                    | creator   | "shmllm01"                     |
    | 0x0008 | VERSION                  | creator   | PROTOCOL_VERSION               |
    | 0x0010 | KIND                     | creator   | SegmentKind                    |
    | 0x0018 | SIZE                     | creator   | length of the file in bytes    |
    | 0x0020 | NONCE                    | creator   | random, tells segments apart   |
    | 0x0028 | CREATOR_PID              | creator   | as its own namespace counts    |
    | 0x0030 | CREATOR_PID_NAMESPACE    | creator   | inode of /proc/self/ns/pid     |
    +--------+--------------------------+-----------+--------------------------------+

CONTROL segment: one per engine, readable by all of its clients.

    +--------+--------------------------+-----------+--------------------------------+
    | 0x0000 | HEADER                   | creator   | see above                      |
    | 0x0080 | CONTROL_STATE            | engine    | EngineState                    |
    | 0x0088 | CONTROL_ENGINE_PID       | engine    | 0 until the engine attached    |
    | 0x0090 | CONTROL_ENGINE_PID_NS    | engine    | inode of its pid namespace     |
    | 0x0100 | CONTROL_HEARTBEAT        | engine    | CLOCK_MONOTONIC, ns            |
    | 0x0180 | CONTROL_PARKED           | engine    | 1 while it sleeps or is about  |
    | 0x0200 | CONTROL_DOORBELL         | libc      | posted by clients              |
    | 0x1000 | CONTROL_STATS            | engine    | 512 words, index Stat          |
    | 0x2000 | CONTROL_LAST_WORDS_SIZE  | engine    | bytes of text that are valid   |
    | 0x2080 | CONTROL_LAST_WORDS       | engine    | 16 KiB UTF-8, why it died      |
    | 0x7000 | CONTROL_END              |           |                                |
    +--------+--------------------------+-----------+--------------------------------+

CLIENT segment: one per front end. Everything before SLOT_DATA is allocated at creation.

    +----------+------------------------+-----------+--------------------------------+
    | 0x000000 | HEADER                 | creator   | see above                      |
    | 0x000080 | CLIENT_STATE           | client    | ClientState                    |
    | 0x000100 | CLIENT_PARKED          | client    | 1 while it sleeps or is about  |
    | 0x000180 | CLIENT_DOORBELL        | libc      | posted by the engine           |
    | 0x000200 | REQUEST_PUBLISHED      | client    | position                       |
    | 0x000280 | REQUEST_CONSUMED       | engine    | position                       |
    | 0x000300 | OUTPUT_PUBLISHED       | engine    | position                       |
    | 0x000380 | OUTPUT_CONSUMED        | client    | position                       |
    | 0x001000 | REQUEST_SLOT_TABLE     | both      | 8 slot entries                 |
    | 0x001800 | OUTPUT_SLOT_TABLE      | both      | 8 slot entries                 |
    | 0x002000 | REQUEST_RING           | client    | 512 KiB of records             |
    | 0x082000 | OUTPUT_RING            | engine    | 512 KiB of records             |
    | 0x102000 | REQUEST_SLOT_DATA      | client    | 8 x 4 MiB, sparse              |
    | 0x2102000| OUTPUT_SLOT_DATA       | engine    | 8 x 4 MiB, sparse              |
    | 0x4102000| CLIENT_END             |           |                                |
    +----------+------------------------+-----------+--------------------------------+

Slot entry, relative to the table plus index * 0x100. A slot is lent while they differ:

    +--------+--------------------------+-----------+--------------------------------+
    | +0x000 | SLOT_PUBLISHED           | writer    | times published                |
    | +0x080 | SLOT_RELEASED            | reader    | times released                 |
    +--------+--------------------------+-----------+--------------------------------+

Doorbell, relative to its offset:

    +--------+--------------------------+-----------+--------------------------------+
    | +0x000 | DOORBELL_KIND            | creator   | DoorbellKind                   |
    | +0x010 | DOORBELL_SEM             | libc      | sem_t, process-shared          |
    | +0x040 | DOORBELL_NAME            | creator   | 64 bytes, NUL-padded           |
    +--------+--------------------------+-----------+--------------------------------+

Record in a ring, aligned to 16 bytes. A record never wraps: where it would not fit before
the end of the ring, a PADDING record fills the rest.

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
from enum import IntEnum

MAGIC = int.from_bytes(b"shmllm01", "little")
PROTOCOL_VERSION = 1

WORD_BYTES = 8
LINE_BYTES = 128
PAGE_BYTES = 4096


class SegmentKind(IntEnum):
    """What a segment is for; stored in its header."""

    CONTROL = 1
    CLIENT = 2


class EngineState(IntEnum):
    """The engine's life, in the order in which it can pass through the states."""

    STARTING = 0
    READY = 1
    SHUTTING_DOWN = 2
    FAILED = 3
    DEAD = 4


class ClientState(IntEnum):
    """What a front end says about itself."""

    CONNECTED = 0
    CLOSING = 1


class Stat(IntEnum):
    """Index into the page of statistics words. Append; never renumber."""

    STEPS = 0
    RUNNING = 1
    WAITING = 2
    KV_BLOCKS_TOTAL = 3
    KV_BLOCKS_USED = 4
    PREFIX_QUERY_TOKENS = 5
    PREFIX_HIT_TOKENS = 6
    PREEMPTIONS = 7
    PROMPT_TOKENS = 8
    GENERATED_TOKENS = 9
    REQUESTS_FINISHED = 10
    STEP_NS = 11
    WEIGHT_BYTES_LOADED = 12
    WEIGHT_BYTES_TOTAL = 13


class DoorbellKind(IntEnum):
    """Which implementation a doorbell's bytes are for."""

    SEM = 1
    NAMED = 2


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
CONTROL_HEARTBEAT_OFFSET = 0x0100
CONTROL_PARKED_OFFSET = 0x0180
CONTROL_DOORBELL_OFFSET = 0x0200
CONTROL_STATS_OFFSET = 0x1000
CONTROL_LAST_WORDS_SIZE_OFFSET = 0x2000
CONTROL_LAST_WORDS_OFFSET = 0x2080
CONTROL_END_OFFSET = 0x7000
NUM_STAT_WORDS = 512
LAST_WORDS_BYTES = 16 * 1024

CLIENT_STATE_OFFSET = 0x0080
CLIENT_PARKED_OFFSET = 0x0100
CLIENT_DOORBELL_OFFSET = 0x0180
REQUEST_PUBLISHED_OFFSET = 0x0200
REQUEST_CONSUMED_OFFSET = 0x0280
OUTPUT_PUBLISHED_OFFSET = 0x0300
OUTPUT_CONSUMED_OFFSET = 0x0380
REQUEST_SLOT_TABLE_OFFSET = 0x1000
OUTPUT_SLOT_TABLE_OFFSET = 0x1800
REQUEST_RING_OFFSET = 0x2000
OUTPUT_RING_OFFSET = 0x82000
REQUEST_SLOT_DATA_OFFSET = 0x102000
OUTPUT_SLOT_DATA_OFFSET = 0x2102000
CLIENT_END_OFFSET = 0x4102000

SLOT_PUBLISHED_OFFSET = 0x000
SLOT_RELEASED_OFFSET = 0x080
SLOT_ENTRY_BYTES = 0x100
NUM_SLOTS = 8
SLOT_BYTES = 4 * 1024 * 1024

DOORBELL_KIND_OFFSET = 0x000
DOORBELL_SEM_OFFSET = 0x010
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
    SegmentKind.CLIENT: REQUEST_SLOT_DATA_OFFSET,
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
    data_offset: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Byte offsets of one direction's tensor slots inside their segment."""

    table_offset: int
    data_offset: int
    num_slots: int
    slot_bytes: int


REQUEST_RING_LAYOUT = RingLayout(
    REQUEST_PUBLISHED_OFFSET, REQUEST_CONSUMED_OFFSET, REQUEST_RING_OFFSET, RING_BYTES
)
OUTPUT_RING_LAYOUT = RingLayout(
    OUTPUT_PUBLISHED_OFFSET, OUTPUT_CONSUMED_OFFSET, OUTPUT_RING_OFFSET, RING_BYTES
)
REQUEST_SLOT_LAYOUT = SlotLayout(
    REQUEST_SLOT_TABLE_OFFSET, REQUEST_SLOT_DATA_OFFSET, NUM_SLOTS, SLOT_BYTES
)
OUTPUT_SLOT_LAYOUT = SlotLayout(
    OUTPUT_SLOT_TABLE_OFFSET, OUTPUT_SLOT_DATA_OFFSET, NUM_SLOTS, SLOT_BYTES
)
