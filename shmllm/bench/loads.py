"""Loads: how the benchmark builds, encodes, decodes and acknowledges each case's payload.

This module owns the loads in shmllm's own encoding; `msgpack_loads` has the same loads as msgpack.
It must not know how the bytes are transported. Encoding includes building the message from the
values that a step or a user provides, and both encodings start from the same lists and arrays.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shmllm.bench import logprobs
from shmllm.bench.cases import TOP_LOGPROBS, Case, Payload
from shmllm.bench.logprobs import LogprobColumns
from shmllm.ipc.ring import BytesLike
from shmllm.outputs.columns import OutputColumns
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind

ACK_BYTES = 8
WORDS_PER_PAGE = 4096 // 8
VOCABULARY = 32_000
SEED = 20_250_101
SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 50,
    "seed": 7,
    "max_tokens": 256,
    "stop_token_ids": [2, 13],
}

Parts = tuple[BytesLike, ...]


@dataclass(frozen=True)
class Load:
    """The functions of both ends of one case.

    Attributes:
        encode: makes the parts of one message from the message's number.
        decode: makes the acknowledgement of a message: its number as eight bytes.
    """

    encode: Callable[[int], Parts]
    decode: Callable[[BytesLike], bytes]


def acknowledgement(number: int) -> bytes:
    """The eight bytes that the receiver sends back for message `number`."""
    return number.to_bytes(ACK_BYTES, "little")


@dataclass(frozen=True)
class StepLoad:
    """The results of one engine step as columns, in the form that the scheduler and sampler use."""

    numbers: list[int]
    token_ids: list[int]
    finishes: list[int]
    columns: LogprobColumns

    @staticmethod
    def of(rows: int) -> StepLoad:
        """Columns of `rows` requests with realistic numbers; the same columns in every call."""
        rng = np.random.default_rng(SEED)
        top = (rows, TOP_LOGPROBS)
        return StepLoad(
            numbers=list(range(100_000, 100_000 + rows)),
            token_ids=rng.integers(0, VOCABULARY, rows).tolist(),
            finishes=[0] * rows,
            columns=LogprobColumns(
                rng.integers(0, VOCABULARY, top, dtype=np.int32),
                -rng.exponential(3.0, top).astype(np.float32),
                rng.integers(1, TOP_LOGPROBS + 1, rows, dtype=np.int32),
            ),
        )


def prompt(num_tokens: int) -> list[int]:
    """The token ids of a random prompt; the same ids in every call."""
    token_ids: list[int] = np.random.default_rng(SEED).integers(0, VOCABULARY, num_tokens).tolist()
    return token_ids


def bytes_load(case: Case) -> Load:
    """A load of plain bytes, the same in every variant.

    The receiver copies a small message and reads one word of each page of a large one.
    """
    source = bytearray(case.size)
    stamp = struct.Struct("<Q").pack_into

    def encode(number: int) -> Parts:
        stamp(source, 0, number)
        return (source,)

    def copy(message: BytesLike) -> bytes:
        return bytes(message)[:ACK_BYTES]

    def read_pages(message: BytesLike) -> bytes:
        words = np.frombuffer(message, np.uint64)
        words[::WORDS_PER_PAGE].sum()
        return words[:1].tobytes()

    return Load(encode, read_pages if case.is_large else copy)


def _add_load(case: Case) -> Load:
    token_ids, params = prompt(case.size), SamplingParams(**SAMPLING)

    def encode(number: int) -> Parts:
        return codec.encode_add(EngineCoreRequest(number, token_ids, params))

    def decode(message: BytesLike) -> bytes:
        request = codec.decode(RecordKind.ADD, memoryview(message))  # type: ignore[arg-type]
        assert isinstance(request, EngineCoreRequest)
        return acknowledgement(request.number)

    return Load(encode, decode)


def _columns(step: StepLoad, number: int) -> OutputColumns:
    return OutputColumns(
        step=number,
        time_ns=time.monotonic_ns(),
        numbers=step.numbers,
        counts=[1] * len(step.numbers),
        finishes=step.finishes,
        token_ids=step.token_ids,
    )


def _outputs_load(case: Case) -> Load:
    step = StepLoad.of(case.size)

    def encode(number: int) -> Parts:
        return codec.encode_outputs(_columns(step, number))

    def encode_with_logprobs(number: int) -> Parts:
        return logprobs.encode(_columns(step, number), step.columns)

    def decode(message: BytesLike) -> bytes:
        outputs = codec.decode(RecordKind.OUTPUTS, memoryview(message))  # type: ignore[arg-type]
        assert isinstance(outputs, OutputColumns)
        return acknowledgement(outputs.step)

    def decode_with_logprobs(message: BytesLike) -> bytes:
        outputs, _ = logprobs.decode(memoryview(message))  # type: ignore[arg-type]
        return acknowledgement(outputs.step)

    if case.logprobs:
        return Load(encode_with_logprobs, decode_with_logprobs)
    return Load(encode, decode)


def wire_load(case: Case) -> Load:
    """The load of `case` in shmllm's own encoding."""
    makers = {
        Payload.BYTES: bytes_load,
        Payload.ADD: _add_load,
        Payload.OUTPUTS: _outputs_load,
    }
    return makers[case.payload](case)
