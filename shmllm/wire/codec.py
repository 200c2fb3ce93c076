"""Encodes messages as bytes and decodes them, without pickle.

Every message is a struct-packed header followed by variable sections. The header gives the lengths
of the sections, and the last one ends exactly at the end of the record. Integers are little-endian.

    HELLO                       version u32, pid u32
    INIT, READY, TRACE          text
    FAILED                      message length u32 | message, traceback
    ADD                         see `add`
    POOL                        see `pooling`
    PROMPT_EMBEDS               number i64 | tensor reference
    PROMPT_ITEM                 see `items`
    ABORT                       numbers i64[]
    OUTPUTS, PROMPT_LOGPROBS    see `outputs`
    EMBEDDINGS, ROUTED_EXPERTS  see `pieces`
    SAMPLING_MASKS              see `pieces`
    REJECTED                    number i64, retryable u32 | message
    CALL                        number i64, method u32 | JSON text
    WORK                        number i64 | JSON text
    REPLY                       number i64, ok u32 | JSON text
    WEIGHTS                     slot u32, offset u64, bytes u64 | JSON text
    WEIGHT_VERSION              length u32 | JSON text
    IN_SLOT                     kind u32, slot u32, offset u32, bytes u32: where a large record is

Encoders return a tuple of byte strings; the ring writes them one after the other without joining
them. A decoder that gets arbitrary bytes raises ProtocolMismatchError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import Struct, error

from shmllm.errors import ProtocolMismatchError, RequestError
from shmllm.wire.add import decode_add, encode_add
from shmllm.wire.items import decode_prompt_item, encode_prompt_item
from shmllm.wire.messages import (
    Abort,
    Call,
    Failed,
    Hello,
    Message,
    Method,
    PromptEmbeds,
    RecordKind,
    Rejected,
    Reply,
    Text,
    Trace,
    Weights,
    WeightVersion,
    Work,
)
from shmllm.wire.outputs import (
    decode_outputs,
    decode_prompt_logprobs,
    encode_outputs,
    encode_prompt_logprobs,
    encode_step,
)
from shmllm.wire.pieces import (
    decode_embeddings,
    decode_routed_experts,
    decode_sampling_masks,
    encode_pieces,
)
from shmllm.wire.pooling import decode_pool, encode_pool
from shmllm.wire.sections import Parts, Sections, column

__all__ = [
    "Parts",
    "decode",
    "decode_in_slot",
    "encode_abort",
    "encode_add",
    "encode_call",
    "encode_failed",
    "encode_hello",
    "encode_in_slot",
    "encode_outputs",
    "encode_pieces",
    "encode_pool",
    "encode_prompt_embeds",
    "encode_prompt_item",
    "encode_prompt_logprobs",
    "encode_rejected",
    "encode_reply",
    "encode_step",
    "encode_text",
    "encode_trace",
    "encode_weight_version",
    "encode_weights",
    "encode_work",
]

HELLO = Struct("<II")
LENGTH = Struct("<I")
NUMBER = Struct("<q")
IN_SLOT = Struct("<IIII")
REJECTED = Struct("<qI")
CALL = Struct("<qI")
WEIGHTS = Struct("<IQQ")


def encode_hello(message: Hello) -> Parts:
    return (HELLO.pack(message.protocol_version, message.pid),)


def encode_text(message: Text) -> Parts:
    return (message.json.encode(),)


def encode_trace(message: Trace) -> Parts:
    return (message.directory.encode(),)


def encode_failed(message: Failed) -> Parts:
    text = message.message.encode()
    return (LENGTH.pack(len(text)), text, message.traceback.encode())


def encode_abort(message: Abort) -> Parts:
    return (column("q", message.numbers),)


def encode_rejected(message: Rejected) -> Parts:
    return (REJECTED.pack(message.number, message.is_retryable), message.message.encode())


def encode_call(message: Call) -> Parts:
    return (CALL.pack(message.number, message.method), message.json.encode())


def encode_work(message: Work) -> Parts:
    return (NUMBER.pack(message.number), message.json.encode())


def encode_weights(message: Weights) -> Parts:
    return (WEIGHTS.pack(*message.slot), message.json.encode())


def encode_weight_version(message: WeightVersion) -> Parts:
    text = json.dumps(message.version).encode()
    return (LENGTH.pack(len(text)), text)


def encode_prompt_embeds(message: PromptEmbeds) -> Parts:
    return (NUMBER.pack(message.number), message.ref)


def encode_reply(message: Reply) -> Parts:
    return (CALL.pack(message.number, message.ok), message.json.encode())


def encode_in_slot(kind: RecordKind, ref: tuple[int, int, int]) -> Parts:
    return (IN_SLOT.pack(kind, *ref),)


def decode_in_slot(record: memoryview) -> tuple[int, tuple[int, int, int]]:
    """Decode an IN_SLOT record as (the kind of the record in the slot, (slot, offset, bytes))."""
    if len(record) != IN_SLOT.size:
        raise ProtocolMismatchError(f"IN_SLOT has {IN_SLOT.size} bytes, got {len(record)}")
    kind, *ref = IN_SLOT.unpack(record)
    if kind == RecordKind.IN_SLOT:
        raise ProtocolMismatchError("a slot holds a reference to a slot")
    return kind, (ref[0], ref[1], ref[2])


def _decode_hello(record: memoryview) -> Hello:
    if len(record) != HELLO.size:
        raise ProtocolMismatchError(f"HELLO has {HELLO.size} bytes, got {len(record)}")
    return Hello(*HELLO.unpack(record))


def _decode_text(record: memoryview) -> Text:
    return Text(str(record, "utf-8"))


def _decode_trace(record: memoryview) -> Trace:
    return Trace(str(record, "utf-8"))


def _decode_failed(record: memoryview) -> Failed:
    sections = Sections(record, LENGTH.size)
    message = sections.text(LENGTH.unpack_from(record)[0])
    return Failed(message, sections.rest())


def _decode_abort(record: memoryview) -> Abort:
    sections = Sections(record, 0)
    numbers = sections.take("q", len(record) // 8)
    sections.end()
    return Abort(numbers)


def _decode_rejected(record: memoryview) -> Rejected:
    number, is_retryable = REJECTED.unpack_from(record)
    return Rejected(number, Sections(record, REJECTED.size).rest(), bool(is_retryable))


def _decode_call(record: memoryview) -> Call:
    number, method = CALL.unpack_from(record)
    return Call(number, Method(method), Sections(record, CALL.size).rest())


def _decode_work(record: memoryview) -> Work:
    return Work(NUMBER.unpack_from(record)[0], Sections(record, NUMBER.size).rest())


def _decode_weights(record: memoryview) -> Weights:
    return Weights(WEIGHTS.unpack_from(record), Sections(record, WEIGHTS.size).rest())


def _decode_weight_version(record: memoryview) -> WeightVersion:
    sections = Sections(record, LENGTH.size)
    version = json.loads(sections.text(LENGTH.unpack_from(record)[0]))
    sections.end()
    if type(version) not in (int, str):
        raise ProtocolMismatchError(f"{version!r} is not a version")
    return WeightVersion(version)


def _decode_prompt_embeds(record: memoryview) -> PromptEmbeds:
    return PromptEmbeds(NUMBER.unpack_from(record)[0], bytes(record[NUMBER.size :]))


def _decode_reply(record: memoryview) -> Reply:
    number, ok = CALL.unpack_from(record)
    return Reply(number, bool(ok), Sections(record, CALL.size).rest())


_DECODERS: dict[int, Callable[[memoryview], Message]] = {
    RecordKind.HELLO: _decode_hello,
    RecordKind.INIT: _decode_text,
    RecordKind.READY: _decode_text,
    RecordKind.FAILED: _decode_failed,
    RecordKind.ADD: decode_add,
    RecordKind.ABORT: _decode_abort,
    RecordKind.OUTPUTS: decode_outputs,
    RecordKind.PROMPT_LOGPROBS: decode_prompt_logprobs,
    RecordKind.REJECTED: _decode_rejected,
    RecordKind.CALL: _decode_call,
    RecordKind.REPLY: _decode_reply,
    RecordKind.WORK: _decode_work,
    RecordKind.WEIGHTS: _decode_weights,
    RecordKind.WEIGHT_VERSION: _decode_weight_version,
    RecordKind.POOL: decode_pool,
    RecordKind.PROMPT_EMBEDS: _decode_prompt_embeds,
    RecordKind.PROMPT_ITEM: decode_prompt_item,
    RecordKind.EMBEDDINGS: decode_embeddings,
    RecordKind.ROUTED_EXPERTS: decode_routed_experts,
    RecordKind.SAMPLING_MASKS: decode_sampling_masks,
    RecordKind.TRACE: _decode_trace,
}


def decode(kind: int, record: memoryview) -> Message:
    """Decode one record.

    Args:
        kind: the kind of the record.
        record: a flat view of its bytes. The message keeps no reference to it.

    Raises:
        ProtocolMismatchError: the kind is unknown, or the bytes are not a message of this kind.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ProtocolMismatchError(f"no message has kind {kind}")
    try:
        return decoder(record)
    except (error, RequestError, ValueError, OverflowError, RecursionError) as problem:
        raise ProtocolMismatchError(f"{RecordKind(kind).name}: {problem}") from problem
