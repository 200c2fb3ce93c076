"""Codec: every message survives, and no bytes do harm."""

from __future__ import annotations

import contextlib
import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.errors import ProtocolMismatchError
from shmllm.outputs import OutputColumns
from shmllm.sampling_params import SamplingParams
from shmllm.wire import codec
from shmllm.wire.messages import (
    Abort,
    AddRequest,
    Call,
    Failed,
    Hello,
    Kind,
    Method,
    Rejected,
    Reply,
    Shutdown,
    Text,
)

int32 = st.integers(-(2**31), 2**31 - 1)
token_id = st.integers(0, 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
uint32 = st.integers(0, 2**32 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@st.composite
def params(draw):
    max_tokens = draw(st.none() | st.integers(1, 2**32 - 1))
    return SamplingParams(
        temperature=draw(st.just(0.0) | st.floats(0.01, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.none() | int64.filter(lambda seed: seed != -1)),
        stop_token_ids=draw(st.lists(token_id, max_size=4)),
        ignore_eos=draw(st.booleans()),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 2**32 - 1)),
    )


@st.composite
def outputs(draw):
    one_each = draw(st.booleans())
    counts = draw(st.lists(st.just(1) if one_each else st.integers(0, 5), max_size=8))
    rows = len(counts)
    cached_rows = draw(st.lists(st.integers(0, rows - 1), max_size=3)) if rows else []
    return OutputColumns(
        step=draw(int64),
        time_ns=draw(int64),
        numbers=draw(st.lists(int64, min_size=rows, max_size=rows)),
        counts=counts,
        finishes=draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)),
        token_ids=draw(st.lists(int32, min_size=sum(counts), max_size=sum(counts))),
        cached_rows=cached_rows,
        cached_counts=draw(st.lists(int32, min_size=len(cached_rows), max_size=len(cached_rows))),
    )


MESSAGES = {
    Kind.HELLO: (codec.encode_hello, st.builds(Hello, uint32, uint32)),
    Kind.INIT: (codec.encode_text, st.builds(Text, text)),
    Kind.READY: (codec.encode_text, st.builds(Text, text)),
    Kind.FAILED: (codec.encode_failed, st.builds(Failed, text, text)),
    Kind.ADD: (
        codec.encode_add,
        st.builds(AddRequest, int64, st.lists(token_id, max_size=20), params(), text),
    ),
    Kind.ABORT: (codec.encode_abort, st.builds(Abort, st.lists(int64, max_size=9))),
    Kind.OUTPUTS: (codec.encode_outputs, outputs()),
    Kind.REJECTED: (codec.encode_rejected, st.builds(Rejected, int64, text)),
    Kind.CALL: (codec.encode_call, st.builds(Call, int64, st.sampled_from(Method))),
    Kind.SHUTDOWN: (
        codec.encode_shutdown,
        st.builds(Shutdown, st.floats(0, allow_infinity=False, allow_nan=False)),
    ),
    Kind.REPLY: (codec.encode_reply, st.builds(Reply, int64, st.booleans(), text)),
}
# Kinds whose last section takes whatever follows: these cannot tell that bytes were added.
OPEN_ENDED = {Kind.INIT, Kind.READY, Kind.FAILED, Kind.REJECTED, Kind.REPLY}
kinds = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.name)


def record_of(kind, message):
    return b"".join(MESSAGES[kind][0](message))


def decode(kind, record):
    return codec.decode(kind, memoryview(record))


def test_every_kind_but_the_reference_is_tested_here():
    assert set(Kind) == {*MESSAGES, Kind.IN_SLOT}


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_message_survives(kind, data):
    message = data.draw(MESSAGES[kind][1])
    decoded = decode(kind, record_of(kind, message))
    if isinstance(decoded, AddRequest):
        decoded.prompt_token_ids = list(decoded.prompt_token_ids)
    assert decoded == message


@kinds
@settings(max_examples=80, deadline=None)
@given(record=st.binary(max_size=160))
def test_arbitrary_bytes_are_refused_or_read(kind, record):
    with contextlib.suppress(ProtocolMismatchError):
        decode(kind, record)


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read(kind, data):
    record = bytearray(record_of(kind, data.draw(MESSAGES[kind][1])) or b"\0")
    for _ in range(data.draw(st.integers(1, 4))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolMismatchError):
        decode(kind, record)


@pytest.mark.parametrize("kind", [k for k in MESSAGES if k not in OPEN_ENDED], ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_record_of_another_length_is_refused(kind, data):
    record = record_of(kind, data.draw(MESSAGES[kind][1]))
    # ABORT is an array of 8 bytes each: only another multiple of 8 is another message.
    cut = data.draw(st.integers(1, 7 if kind is Kind.ABORT else max(len(record), 1)))
    with pytest.raises(ProtocolMismatchError):
        decode(kind, record + b"\0" * min(cut, 7))
    if cut <= len(record):
        with pytest.raises(ProtocolMismatchError):
            decode(kind, record[:-cut])


@pytest.mark.parametrize(
    ("kind", "header_bytes"),
    [(Kind.FAILED, 4), (Kind.REJECTED, 8), (Kind.REPLY, 12)],
    ids=["FAILED", "REJECTED", "REPLY"],
)
def test_a_cut_header_is_refused(kind, header_bytes):
    for length in range(header_bytes):
        with pytest.raises(ProtocolMismatchError):
            decode(kind, b"\0" * length)
    decode(kind, b"\0" * header_bytes)


@pytest.mark.parametrize("kind", [0, Kind.IN_SLOT, 99, -1, 2**32])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ProtocolMismatchError, match=f"kind {kind:d}"):
        decode(kind, b"")


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (Kind.INIT, b"\xff"),
        (Kind.FAILED, struct.pack("<I", 1) + b"\xc3"),
        (Kind.REJECTED, struct.pack("<q", 1) + b"\xe2\x82"),
        (Kind.REPLY, struct.pack("<qI", 1, 1) + b"\x80"),
    ],
    ids=["INIT", "FAILED", "REJECTED", "REPLY"],
)
def test_text_that_is_not_utf8_is_refused(kind, record):
    with pytest.raises(ProtocolMismatchError, match=kind.name):
        decode(kind, record)


def test_an_unknown_method_is_refused():
    with pytest.raises(ProtocolMismatchError, match="77"):
        decode(Kind.CALL, struct.pack("<qI", 1, 77))


def test_parameters_out_of_range_are_refused():
    record = bytearray(record_of(Kind.ADD, AddRequest(1, [5], SamplingParams())))
    struct.pack_into("<d", record, 16, float("nan"))
    with pytest.raises(ProtocolMismatchError, match="ADD: temperature"):
        decode(Kind.ADD, record)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_shutdown_without_an_end_is_refused(seconds):
    with pytest.raises(ProtocolMismatchError, match="SHUTDOWN cannot drain"):
        decode(Kind.SHUTDOWN, struct.pack("<d", seconds))


def test_announced_sections_beyond_the_record_are_refused_without_being_read():
    record = bytearray(record_of(Kind.ADD, AddRequest(1, [5], SamplingParams())))
    struct.pack_into("<I", record, codec.ADD_HEADER.size - 12, 2**32 - 1)
    with pytest.raises(ProtocolMismatchError, match="announces a section"):
        decode(Kind.ADD, record)


def outputs_record(*, rows=2, cached=0, tokens=2, flags=1, body=b""):
    return codec.OUTPUTS_HEADER.pack(0, 0, rows, cached, tokens, flags) + body


@pytest.mark.parametrize(
    "record",
    [
        outputs_record(tokens=1, body=bytes(16 + 4 + 2)),
        outputs_record(flags=0, body=bytes(16 + 8) + array("H", [1, 2]).tobytes() + bytes(2)),
        outputs_record(cached=1, body=bytes(16) + array("i", [2, 0]).tobytes() + bytes(8 + 2)),
        outputs_record(cached=1, body=bytes(16) + array("i", [-1, 0]).tobytes() + bytes(8 + 2)),
    ],
    ids=["too few tokens", "counts exceed tokens", "cached row too high", "cached row negative"],
)
def test_columns_that_do_not_fit_together_are_refused(record):
    with pytest.raises(ProtocolMismatchError, match="do not fit together"):
        decode(Kind.OUTPUTS, record)


def test_a_decode_step_carries_no_counts():
    one_each = OutputColumns(numbers=[1, 2], counts=[1, 1], finishes=[0, 0], token_ids=[5, 6])
    mixed = OutputColumns(numbers=[1, 2], counts=[0, 2], finishes=[0, 0], token_ids=[5, 6])
    lengths = [len(record_of(Kind.OUTPUTS, message)) for message in (one_each, mixed)]
    assert lengths[1] - lengths[0] == 2 * 2


def test_a_decoded_message_does_not_hold_the_record():
    record = bytearray(record_of(Kind.ADD, AddRequest(1, [5, 6], SamplingParams(), "salt")))
    view = memoryview(record)
    message = codec.decode(Kind.ADD, view)
    view.release()
    record.clear()
    assert list(message.prompt_token_ids) == [5, 6]
    assert message.cache_salt == "salt"


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens"])
def test_a_length_beyond_32_bits_means_the_largest(name):
    wanted = SamplingParams(max_tokens=2**40, min_tokens=2**40 if name == "min_tokens" else 0)
    received = decode(Kind.ADD, record_of(Kind.ADD, AddRequest(1, [5], wanted)))
    assert getattr(received.params, name) == 2**32 - 1


@pytest.mark.parametrize("top_k", [2**31, 2**40])
def test_a_top_k_beyond_32_bits_keeps_every_token(top_k):
    record = record_of(Kind.ADD, AddRequest(1, [5], SamplingParams(top_k=top_k)))
    received = decode(Kind.ADD, record).params.top_k
    assert received <= 0 or received == 2**31 - 1


@given(ref=st.tuples(uint32, uint32, uint32))
def test_a_reference_to_a_slot_survives(ref):
    record = b"".join(codec.encode_in_slot(Kind.ADD, ref))
    assert codec.decode_in_slot(memoryview(record)) == (Kind.ADD, ref)


def test_a_reference_to_a_reference_is_refused():
    (record,) = codec.encode_in_slot(Kind.IN_SLOT, (0, 0, 0))
    with pytest.raises(ProtocolMismatchError, match="reference"):
        codec.decode_in_slot(memoryview(record))


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_reference_of_another_length_is_refused(length):
    with pytest.raises(ProtocolMismatchError, match="16 bytes"):
        codec.decode_in_slot(memoryview(bytes(length)))
