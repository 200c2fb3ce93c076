"""Where every byte of a recording lies, and the names of what is recorded.

Owns numbers only. A recording is a file that one process writes through a shared mapping,
so that whatever ends the process, what it wrote is there. All integers are little-endian.

    +--------+------------------+-------------------------------------------------------+
    | 0x0000 | MAGIC            | "shmtrace"                                            |
    | 0x0008 | VERSION          | u32                                                   |
    | 0x000C | PID              | u32, of the process                                   |
    | 0x0010 | DROPPED          | u64, records for which there was no room              |
    | 0x0018 | FACTS_SIZE       | u64, bytes of text that are valid                     |
    | 0x0020 | FACTS            | UTF-8: a JSON object, what the process says of itself |
    | 0x1000 | records          | 64 bytes each, see below                              |
    +--------+------------------+-------------------------------------------------------+

A record. Times are CLOCK_MONOTONIC in ns. A record of type 0 was not written:

    +--------+------------------+-------------------------------------------------------+
    | +0x00  | type             | u16, Type                                             |
    | +0x02  | name             | u16, Slice, Moment, or the kind of a ring's record    |
    | +0x04  | thread           | u32, its id in the kernel                             |
    | +0x08  | begin, end       | u64 each                                              |
    | +0x18  | a, b, c, d, e    | u64 each, see the names                               |
    +--------+------------------+-------------------------------------------------------+
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = b"shmtrace"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ")
DROPPED_OFFSET = 0x10
FACTS_OFFSET = HEADER.size
RECORDS_OFFSET = 0x1000
RECORD = struct.Struct("<HHIQQQQQQQ")
RECORD_BYTES = RECORD.size
CHUNK_BYTES = 1024 * 1024
RECORDS_PER_CHUNK = CHUNK_BYTES // RECORD_BYTES
SUFFIX = ".recording"


class Type(IntEnum):
    """What a record is."""

    SLICE = 1
    MOMENT = 2
    SENT = 3
    RECEIVED = 4
    STEP = 5
    PHASES = 6


class Slice(IntEnum):
    """What a thread did from begin to end. The comment says what a, b, ... are."""

    START_ENGINE = 1  # of a front end
    LOAD_TOKENIZER = 2
    TOKENIZE = 3  # prompts
    PROCESS = 4  # events, tokens, requests ended
    IMPORT = 5  # of an engine
    LOAD_MODEL = 6
    DRAIN = 7
    PUBLISH = 8  # step


class Event(IntEnum):
    """Something in a request's life, or a front end's. `owner` is its place at the engine
    in an engine's recording, and in a front end's the id of its rings."""

    JOINED = 1  # place, id of its rings, pid
    LEFT = 2  # place
    QUEUED = 3  # owner, number, prompt tokens
    ADMITTED = 4  # owner, number, tokens that the prefix cache had, times preempted
    PREFILL = 5  # owner, number, first position, tokens, step
    PREEMPTED = 6  # owner, number, tokens so far
    ENDED = 7  # owner, number, reason, output tokens
    REJECTED = 8  # owner, number
    SUBMITTED = 9  # owner, number, prompt tokens
    FINISHED = 10  # owner, number, reason, output tokens; its last text was made meanwhile
    DISCARDED = 11  # owner, number


# SENT and RECEIVED: id of the rings, position behind the record, bytes, Direction.
# STEP: step, requests, tokens, running << 32 | waiting, KV blocks used.
# PHASES: step, and when schedule, prepare, execute and sample ended.


class Direction(IntEnum):
    """Which of a front end's two rings."""

    REQUESTS = 0
    OUTPUTS = 1


REASONS = ("none", "stop", "length", "abort", "error", "repetition")
"""Why requests end, by their number on the wire."""
