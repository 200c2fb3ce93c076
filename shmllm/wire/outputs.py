"""OUTPUTS and PROMPT_LOGPROBS: encodes and decodes the results of a step, as columns.

OUTPUTS   OUTPUTS_HEADER | numbers i64[], cached rows i32[], cached counts i32[],
          token ids i32[], counts u16[] (absent if each is 1),
          finishes u8[] (absent if each is 0),
          queued i64[], scheduled i64[] (of the cached rows; absent if not known),
          preempted u32, rows i32[], counts i32[] (absent if none),
          drafted u32, rows i32[], drafted counts i32[], accepted counts i32[] (absent if none),
          LOGPROBS_HEADER | rows i32[], ks i32[], logprobs f32[], ranks i32[],
          top ids i32[], top logprobs f32[] (absent if no row asked for them)
PROMPT_LOGPROBS
          PROMPT_HEADER | logprobs f32[], ranks i32[], top ids i32[], top logprobs f32[]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from struct import Struct

import numpy as np

from shmllm.errors import ProtocolMismatchError
from shmllm.outputs.columns import OutputColumns
from shmllm.outputs.logprobs import LogprobColumns, PromptLogprobs
from shmllm.wire.messages import RecordKind
from shmllm.wire.pieces import KIND_OF_PIECES, encode_pieces
from shmllm.wire.sections import Parts, Sections, column

# step, time_ns, rows, cached rows, tokens, flags
OUTPUTS_HEADER = Struct("<qqIIII")
# rows with log-probabilities, their tokens, alternatives of these
LOGPROBS_HEADER = Struct("<III")
# number, position of the first token, tokens, alternatives of each
PROMPT_HEADER = Struct("<qIII")

ONE_TOKEN_EACH = 1
NONE_FINISHED = 2
HAS_LOGPROBS = 4
HAS_TIMES = 8
HAS_PREEMPTED = 16
HAS_DRAFTED = 32
PLAIN = ONE_TOKEN_EACH | NONE_FINISHED
"""The flags of most steps, which produce one token for each request and end none."""

MAX_ROWS_PER_RECORD = 8192
MAX_BYTES_PER_RECORD = 2**22 - 2**18
"""The most log-probabilities in one record. A record that the ring cannot hold lies in a slot,
and there are several slots of this size."""

MAX_PIECE_BYTES = 2**17
"""The most bytes of pieces in one record, so that the ring can hold it."""


def encode_step(columns: OutputColumns) -> Iterator[tuple[RecordKind, Parts]]:
    """Encode the results of a step for one front end, as (kind, parts) of each record."""
    for scored in columns.prompt_logprobs:
        for piece in scored.parts(MAX_BYTES_PER_RECORD):
            yield RecordKind.PROMPT_LOGPROBS, encode_prompt_logprobs(piece)
    for pieces in columns.all_pieces:
        for part in pieces.parts(MAX_PIECE_BYTES):
            yield KIND_OF_PIECES[type(part)], encode_pieces(part)
    for rows in columns.parts(MAX_ROWS_PER_RECORD, MAX_BYTES_PER_RECORD):
        yield RecordKind.OUTPUTS, encode_outputs(rows)


def encode_outputs(message: OutputColumns) -> Parts:
    rows, tokens = len(message.numbers), len(message.token_ids)
    one_each = rows == tokens and message.counts.count(1) == rows
    none_finished = message.finishes.count(0) == rows
    flags = (
        (ONE_TOKEN_EACH if one_each else 0)
        | (NONE_FINISHED if none_finished else 0)
        | (HAS_LOGPROBS if message.logprobs is not None else 0)
        | (HAS_TIMES if message.queued_ns else 0)
        | (HAS_PREEMPTED if message.preempted_rows else 0)
        | (HAS_DRAFTED if message.drafted_rows else 0)
    )
    header = message.step, message.time_ns, rows, len(message.cached_rows), tokens, flags
    if flags == PLAIN and not message.cached_rows:
        return (_plain_record(rows).pack(*header, *message.numbers, *message.token_ids),)
    return (
        OUTPUTS_HEADER.pack(*header),
        column("q", message.numbers),
        column("i", message.cached_rows),
        column("i", message.cached_counts),
        column("i", message.token_ids),
        b"" if one_each else column("H", message.counts),
        b"" if none_finished else bytes(message.finishes),
        *_encode_history(message),
        *(() if message.logprobs is None else _encode_logprobs(message.logprobs)),
    )


@lru_cache(maxsize=1024)
def _plain_record(rows: int) -> Struct:
    return Struct(f"{OUTPUTS_HEADER.format}{rows}q{rows}i")


def _encode_history(message: OutputColumns) -> Parts:
    parts: Parts = ()
    if message.queued_ns:
        parts = (column("q", message.queued_ns), column("q", message.scheduled_ns))
    if message.preempted_rows:
        rows, counts = message.preempted_rows, message.preempted_counts
        parts += (column("I", [len(rows)]), column("i", rows), column("i", counts))
    if rows := message.drafted_rows:
        parts += (column("I", [len(rows)]), column("i", rows))
        parts += (column("i", message.drafted_counts), column("i", message.accepted_counts))
    return parts


def _encode_logprobs(columns: LogprobColumns) -> Parts:
    return (
        LOGPROBS_HEADER.pack(len(columns.rows), len(columns.logprobs), len(columns.top_ids)),
        column("i", columns.rows),
        column("i", columns.ks),
        columns.logprobs.tobytes(),
        columns.ranks.tobytes(),
        columns.top_ids.tobytes(),
        columns.top_logprobs.tobytes(),
    )


def encode_prompt_logprobs(message: PromptLogprobs) -> Parts:
    return (
        PROMPT_HEADER.pack(message.number, message.first, len(message.logprobs), message.k),
        message.logprobs.tobytes(),
        message.ranks.tobytes(),
        message.top_ids.tobytes(),
        message.top_logprobs.tobytes(),
    )


def decode_outputs(record: memoryview) -> OutputColumns:
    step, time_ns, rows, cached, tokens, flags = OUTPUTS_HEADER.unpack_from(record)
    if flags == PLAIN and not cached:
        return _decode_plain(record, rows, tokens)
    sections = Sections(record, OUTPUTS_HEADER.size)
    numbers = sections.take("q", rows)
    cached_rows = sections.take("i", cached)
    cached_counts = sections.take("i", cached)
    token_ids = sections.take("i", tokens)
    one_each = flags & ONE_TOKEN_EACH
    counts = [1] * len(numbers) if one_each else sections.take("H", rows)
    finishes = [0] * len(numbers) if flags & NONE_FINISHED else sections.take("B", rows)
    queued, scheduled = (sections.take("q", cached if flags & HAS_TIMES else 0) for _ in "qs")
    (preempted,) = sections.take("I", 1) if flags & HAS_PREEMPTED else (0,)
    preempted_rows, preempted_counts = (sections.take("i", preempted) for _ in "rc")
    (drafted,) = sections.take("I", 1) if flags & HAS_DRAFTED else (0,)
    drafted_rows, drafted_counts, accepted = (sections.take("i", drafted) for _ in "rda")
    logprobs = _decode_logprobs(sections, counts) if flags & HAS_LOGPROBS else None
    sections.end()
    total = rows if one_each else sum(counts)
    for named in (cached_rows, preempted_rows, drafted_rows):
        if named and not 0 <= min(named) <= max(named) < rows:
            total = -1
    if total != tokens:
        raise ProtocolMismatchError("the columns of OUTPUTS are inconsistent")
    return OutputColumns(
        step,
        time_ns,
        numbers,
        counts,
        finishes,
        token_ids,
        cached_rows,
        cached_counts,
        logprobs,
        queued_ns=queued,
        scheduled_ns=scheduled,
        preempted_rows=preempted_rows,
        preempted_counts=preempted_counts,
        drafted_rows=drafted_rows,
        drafted_counts=drafted_counts,
        accepted_counts=accepted,
    )


def _decode_plain(record: memoryview, rows: int, tokens: int) -> OutputColumns:
    form = _plain_record(min(rows, MAX_ROWS_PER_RECORD))
    if rows != tokens or len(record) != form.size:
        raise ProtocolMismatchError("the columns of OUTPUTS are inconsistent")
    step, time_ns, _, _, _, _, *columns = form.unpack(record)
    return OutputColumns(step, time_ns, columns[:rows], [1] * rows, [0] * rows, columns[rows:])


def _decode_logprobs(sections: Sections, counts: list[int]) -> LogprobColumns:
    num_rows, tokens, entries = LOGPROBS_HEADER.unpack(sections.take_bytes(LOGPROBS_HEADER.size))
    rows, ks = sections.take("i", num_rows), sections.take("i", num_rows)
    in_order = rows == sorted(set(rows))
    there = not rows or 0 <= rows[0] <= rows[-1] < len(counts)
    if not in_order or not there or min(ks, default=0) < 0:
        raise ProtocolMismatchError("the log-probabilities of OUTPUTS name rows that do not exist")
    sizes = [counts[row] for row in rows]
    wanted = sum(size * k for size, k in zip(sizes, ks, strict=True))
    if (sum(sizes), wanted) != (tokens, entries):
        raise ProtocolMismatchError("the log-probabilities of OUTPUTS do not match its rows")
    return LogprobColumns(
        rows,
        ks,
        sections.take_array(np.float32, tokens),
        sections.take_array(np.int32, tokens),
        sections.take_array(np.int32, entries),
        sections.take_array(np.float32, entries),
    )


def decode_prompt_logprobs(record: memoryview) -> PromptLogprobs:
    number, first, tokens, k = PROMPT_HEADER.unpack_from(record)
    sections = Sections(record, PROMPT_HEADER.size)
    message = PromptLogprobs(
        number,
        first,
        k,
        sections.take_array(np.float32, tokens),
        sections.take_array(np.int32, tokens),
        sections.take_array(np.int32, tokens * k),
        sections.take_array(np.float32, tokens * k),
    )
    sections.end()
    return message
