"""The layout of a recording, and the numbers of everything that is recorded.

This module holds numbers only. A recording is a file that one process writes through a shared
mapping, so the file keeps all written records even if the process is killed. All integers are
little-endian.

    +--------+------------------+-------------------------------------------------------+
    | 0x0000 | MAGIC            | "shmtrace"                                            |
    | 0x0008 | VERSION          | u32                                                   |
    | 0x000C | PID              | u32, pid of the process                               |
    | 0x0010 | DROPPED          | u64, number of records that found no room             |
    | 0x0018 | FACTS_SIZE       | u64, bytes of text that are valid                     |
    | 0x0020 | FACTS            | UTF-8: a JSON object with facts about the process     |
    | 0x1000 | records          | 64 bytes each, see below                              |
    +--------+------------------+-------------------------------------------------------+

A record. Times are CLOCK_MONOTONIC in ns. Type 0 means that the record was not written:

    +--------+------------------+-------------------------------------------------------+
    | +0x00  | type             | u16, Type                                             |
    | +0x02  | name             | u16, Slice, Event, or the kind of a ring's record     |
    | +0x04  | thread           | u32, the kernel's thread id                           |
    | +0x08  | begin, end       | u64 each                                              |
    | +0x18  | a, b, c, d, e    | u64 each, see the comments of the enums               |
    +--------+------------------+-------------------------------------------------------+
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = b"shmtrace"
VERSION = 2
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
    """The type of a record. The comments below the enums list the values a, b, ... of types that
    are neither SLICE nor EVENT."""

    SLICE = 1
    EVENT = 2
    SENT = 3
    RECEIVED = 4
    STEP = 5
    PHASES = 6


class Slice(IntEnum):
    """An activity of a thread from begin to end. The comments list the values a, b, ...; IMPORT,
    LOAD_MODEL, DRAIN and PUBLISH belong to an engine, RANK_STEP and RANK_LAUNCH to another process
    that computes with it, the others to a front end."""

    START_ENGINE = 1
    LOAD_TOKENIZER = 2
    TOKENIZE = 3  # prompts
    PROCESS = 4  # engine outputs, requests changed, requests finished
    IMPORT = 5
    LOAD_MODEL = 6
    DRAIN = 7
    PUBLISH = 8
    RANK_STEP = 9  # step + 1, or 0 if it is not known; ns of waiting for other ranks; RankStep
    RANK_LAUNCH = 10  # the same, where a GPU computes the step, and waits by itself: 0 ns


class RankStep(IntEnum):
    """What a rank did in a step."""

    STEP = 1
    SCORING = 2
    SHARING = 4


class Event(IntEnum):
    """An event of a request or of a front end. The comments list the values a, b, ...

    `owner` identifies the request's front end: in an engine's recording by its place at the
    engine, in a front end's recording by the connection. SUBMITTED and the members after it belong
    to a front end's recording, the others to an engine's.
    """

    JOINED = 1  # place, connection, pid
    LEFT = 2  # place
    QUEUED = 3  # owner, number, prompt tokens
    ADMITTED = 4  # owner, number, prefix-cache hit in tokens, preemptions so far
    PREFILL = 5  # owner, number, first position, tokens, step
    PREEMPTED = 6  # owner, number, tokens so far
    ENDED = 7  # owner, number, reason, output tokens
    REJECTED = 8  # owner, number
    SUBMITTED = 9  # owner, number, prompt tokens
    FINISHED = 10  # owner, number, reason, output tokens; from begin to end the last text was made
    DISCARDED = 11  # owner, number


# SENT and RECEIVED: connection, position of the record's end, bytes, Direction.
# STEP: step, requests, drafted tokens << 32 | tokens, running << 32 | waiting, KV blocks used.
# PHASES: step, and the ends of schedule, prepare, execute and sample.


class Direction(IntEnum):
    """One of the two rings of a connection."""

    REQUESTS = 0
    OUTPUTS = 1


REASONS = ("none", "stop", "length", "abort", "error", "repetition")
"""The names of finish reasons, by their number on the wire."""
