"""Bytes and messages. No pickle; a decoder given arbitrary bytes raises ProtocolMismatchError.

Every message is a struct-packed header followed by its variable sections, whose lengths
the header gives and which end exactly at the record's end. Integers are little-endian.

    HELLO     version u32, pid u32
    INIT      text                                                    READY the same
    FAILED    message length u32 | message, traceback
    ADD       ADD_HEADER | prompt ids i32[], stop ids i32[], salt
    ABORT     numbers i64[]
    OUTPUTS   OUTPUTS_HEADER | numbers i64[], cached rows i32[], cached counts i32[],
              token ids i32[], counts u16[] (absent if each is 1),
              finishes u8[] (absent if each is 0)
    REJECTED  number i64 | message
    IN_SLOT   kind u32, slot u32, offset u32, bytes u32: a record that lies in a tensor slot
    CALL      number i64, method u32                              SHUTDOWN  seconds f64
    REPLY     number i64, ok u32 | JSON text

Encoders return parts, which the ring writes one behind the other without joining them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct, error, pack
from typing import Literal

from shmllm.errors import ProtocolMismatchError, RequestError
from shmllm.outputs import OutputColumns
from shmllm.sampling_params import SamplingParams
from shmllm.wire.messages import (
    Abort,
    AddRequest,
    Call,
    Failed,
    Hello,
    Kind,
    Message,
    Method,
    Rejected,
    Reply,
    Shutdown,
    Text,
)

Parts = tuple[bytes, ...]

HELLO = Struct("<II")
LENGTH = Struct("<I")
# number, seed, temperature, top_p, min_p, top_k, max_tokens, min_tokens, flags,
# prompt tokens, stop ids, salt bytes
ADD_HEADER = Struct("<qqdddiIIIIII")
# step, time_ns, rows, cached rows, tokens, flags
OUTPUTS_HEADER = Struct("<qqIIII")
IN_SLOT = Struct("<IIII")
NUMBER = Struct("<q")
CALL = Struct("<qI")
SHUTDOWN = Struct("<d")

ADD_HAS_SEED = 1
ADD_IGNORE_EOS = 2
ADD_UNBOUNDED = 4
OUTPUTS_ONE_TOKEN_EACH = 1
OUTPUTS_NONE_FINISHED = 2
MAX_TOP_K = 2**31 - 1


def _column(typecode: str, values: Sequence[int]) -> bytes:
    # Two to four times as fast as array(typecode, values), which converts item by item.
    return pack(f"<{len(values)}{typecode}", *values)


def encode_hello(message: Hello) -> Parts:
    return (HELLO.pack(message.protocol_version, message.pid),)


def encode_text(message: Text) -> Parts:
    return (message.json.encode(),)


def encode_failed(message: Failed) -> Parts:
    text = message.message.encode()
    return (LENGTH.pack(len(text)), text, message.traceback.encode())


def encode_add(message: AddRequest) -> Parts:
    params = message.params
    flags = (
        (ADD_HAS_SEED if params.seed is not None else 0)
        | (ADD_IGNORE_EOS if params.ignore_eos else 0)
        | (ADD_UNBOUNDED if params.max_tokens is None else 0)
    )
    salt = message.cache_salt.encode()
    header = ADD_HEADER.pack(
        message.number,
        params.seed or 0,
        params.temperature,
        params.top_p,
        params.min_p,
        min(params.top_k, MAX_TOP_K),
        min(params.max_tokens or 0, 2**32 - 1),
        min(params.min_tokens, 2**32 - 1),
        flags,
        len(message.prompt_token_ids),
        len(params.stop_token_ids),
        len(salt),
    )
    return (
        header,
        _column("i", message.prompt_token_ids),
        _column("i", params.stop_token_ids),
        salt,
    )


def encode_abort(message: Abort) -> Parts:
    return (_column("q", message.numbers),)


def encode_rejected(message: Rejected) -> Parts:
    return (NUMBER.pack(message.number), message.message.encode())


def encode_call(message: Call) -> Parts:
    return (CALL.pack(message.number, message.method),)


def encode_shutdown(message: Shutdown) -> Parts:
    return (SHUTDOWN.pack(message.drain_s),)


def encode_reply(message: Reply) -> Parts:
    return (CALL.pack(message.number, message.ok), message.json.encode())


def encode_in_slot(kind: Kind, ref: tuple[int, int, int]) -> Parts:
    return (IN_SLOT.pack(kind, *ref),)


def decode_in_slot(record: memoryview) -> tuple[int, tuple[int, int, int]]:
    """(kind of the record that lies in the slot, (slot, offset, bytes))."""
    if len(record) != IN_SLOT.size:
        raise ProtocolMismatchError(f"IN_SLOT has {IN_SLOT.size} bytes, got {len(record)}")
    kind, *ref = IN_SLOT.unpack(record)
    if kind == Kind.IN_SLOT:
        raise ProtocolMismatchError("a slot holds a reference to a slot")
    return kind, (ref[0], ref[1], ref[2])


def encode_outputs(message: OutputColumns) -> Parts:
    rows, tokens = len(message.numbers), len(message.token_ids)
    one_each = rows == tokens and message.counts.count(1) == rows
    none_finished = message.finishes.count(0) == rows
    header = OUTPUTS_HEADER.pack(
        message.step,
        message.time_ns,
        rows,
        len(message.cached_rows),
        tokens,
        (OUTPUTS_ONE_TOKEN_EACH if one_each else 0)
        | (OUTPUTS_NONE_FINISHED if none_finished else 0),
    )
    return (
        header,
        _column("q", message.numbers),
        _column("i", message.cached_rows),
        _column("i", message.cached_counts),
        _column("i", message.token_ids),
        b"" if one_each else _column("H", message.counts),
        b"" if none_finished else bytes(message.finishes),
    )


class _Sections:
    """Takes typed columns off a record, from `offset` to exactly its end."""

    __slots__ = ("offset", "record")

    def __init__(self, record: memoryview, offset: int) -> None:
        self.record = record
        self.offset = offset

    def take(self, typecode: Literal["i", "q", "H", "B"], item_bytes: int, count: int) -> list[int]:
        if not count:
            return []
        return memoryview(self.take_bytes(count * item_bytes)).cast(typecode).tolist()

    def take_bytes(self, length: int) -> bytes:
        end = self.offset + length
        if end > len(self.record):
            raise ProtocolMismatchError(
                f"a record of {len(self.record)} bytes announces a section that ends at byte {end}"
            )
        column = bytes(self.record[self.offset : end])
        self.offset = end
        return column

    def text(self, length: int) -> str:
        return self.take_bytes(length).decode()

    def rest(self) -> str:
        return self.text(len(self.record) - self.offset)

    def end(self) -> None:
        if self.offset != len(self.record):
            raise ProtocolMismatchError(
                f"{len(self.record) - self.offset} bytes follow a record's last section"
            )


def _decode_hello(record: memoryview) -> Hello:
    if len(record) != HELLO.size:
        raise ProtocolMismatchError(f"HELLO has {HELLO.size} bytes, got {len(record)}")
    return Hello(*HELLO.unpack(record))


def _decode_text(record: memoryview) -> Text:
    return Text(str(record, "utf-8"))


def _decode_failed(record: memoryview) -> Failed:
    sections = _Sections(record, LENGTH.size)
    message = sections.text(LENGTH.unpack_from(record)[0])
    return Failed(message, sections.rest())


def _decode_add(record: memoryview) -> AddRequest:
    (
        number,
        seed,
        temperature,
        top_p,
        min_p,
        top_k,
        max_tokens,
        min_tokens,
        flags,
        num_prompt_tokens,
        num_stop_ids,
        salt_bytes,
    ) = ADD_HEADER.unpack_from(record)
    sections = _Sections(record, ADD_HEADER.size)
    prompt = array("i", sections.take_bytes(4 * num_prompt_tokens))
    stop_ids = sections.take_bytes(4 * num_stop_ids)
    salt = sections.text(salt_bytes)
    sections.end()
    params = _params(
        seed if flags & ADD_HAS_SEED else None,
        temperature,
        top_p,
        min_p,
        top_k,
        None if flags & ADD_UNBOUNDED else max_tokens,
        min_tokens,
        bool(flags & ADD_IGNORE_EOS),
        stop_ids,
    )
    return AddRequest(number, prompt, params, salt)


@lru_cache(maxsize=64)
def _params(
    seed: int | None,
    temperature: float,
    top_p: float,
    min_p: float,
    top_k: int,
    max_tokens: int | None,
    min_tokens: int,
    ignore_eos: bool,
    stop_ids: bytes,
) -> SamplingParams:
    """Equal parameters share one object, since most requests of a batch have the same and
    building one takes longer than the rest of the decoding. The engine changes none."""
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=array("i", stop_ids).tolist(),
    )


def _decode_abort(record: memoryview) -> Abort:
    sections = _Sections(record, 0)
    numbers = sections.take("q", 8, len(record) // 8)
    sections.end()
    return Abort(numbers)


def _decode_rejected(record: memoryview) -> Rejected:
    return Rejected(NUMBER.unpack_from(record)[0], _Sections(record, NUMBER.size).rest())


def _decode_call(record: memoryview) -> Call:
    if len(record) != CALL.size:
        raise ProtocolMismatchError(f"CALL has {CALL.size} bytes, got {len(record)}")
    number, method = CALL.unpack(record)
    return Call(number, Method(method))


def _decode_shutdown(record: memoryview) -> Shutdown:
    (drain_s,) = SHUTDOWN.unpack(record)
    if not 0 <= drain_s < float("inf"):
        raise ProtocolMismatchError(f"SHUTDOWN cannot drain for {drain_s} seconds")
    return Shutdown(drain_s)


def _decode_reply(record: memoryview) -> Reply:
    number, ok = CALL.unpack_from(record)
    return Reply(number, bool(ok), _Sections(record, CALL.size).rest())


def _decode_outputs(record: memoryview) -> OutputColumns:
    step, time_ns, rows, cached, tokens, flags = OUTPUTS_HEADER.unpack_from(record)
    sections = _Sections(record, OUTPUTS_HEADER.size)
    numbers = sections.take("q", 8, rows)
    cached_rows = sections.take("i", 4, cached)
    cached_counts = sections.take("i", 4, cached)
    token_ids = sections.take("i", 4, tokens)
    one_each = flags & OUTPUTS_ONE_TOKEN_EACH
    counts = [1] * len(numbers) if one_each else sections.take("H", 2, rows)
    finishes = [0] * len(numbers) if flags & OUTPUTS_NONE_FINISHED else sections.take("B", 1, rows)
    sections.end()
    total = rows if one_each else sum(counts)
    if total != tokens or (cached_rows and not 0 <= min(cached_rows) <= max(cached_rows) < rows):
        raise ProtocolMismatchError("the columns of OUTPUTS do not fit together")
    return OutputColumns(
        step, time_ns, numbers, counts, finishes, token_ids, cached_rows, cached_counts
    )


_DECODERS: dict[int, Callable[[memoryview], Message]] = {
    Kind.HELLO: _decode_hello,
    Kind.INIT: _decode_text,
    Kind.READY: _decode_text,
    Kind.FAILED: _decode_failed,
    Kind.ADD: _decode_add,
    Kind.ABORT: _decode_abort,
    Kind.OUTPUTS: _decode_outputs,
    Kind.REJECTED: _decode_rejected,
    Kind.CALL: _decode_call,
    Kind.REPLY: _decode_reply,
    Kind.SHUTDOWN: _decode_shutdown,
}


def decode(kind: int, record: memoryview) -> Message:
    """The message in `record`, a flat view of bytes, which is not referred to afterwards.

    Raises:
        ProtocolMismatchError: an unknown kind, or bytes that are no such message.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ProtocolMismatchError(f"no message has kind {kind}")
    try:
        return decoder(record)
    except (error, UnicodeDecodeError, RequestError, ValueError, OverflowError) as problem:
        raise ProtocolMismatchError(f"{Kind(kind).name}: {problem}") from problem
