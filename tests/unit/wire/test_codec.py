"""The codec: every message can be encoded and decoded, and invalid bytes are refused."""

from __future__ import annotations

import contextlib
import itertools
import struct
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.variants import slow

from shmllm.errors import ProtocolMismatchError
from shmllm.outputs.columns import (
    Embeddings,
    FinishReason,
    MaskColumns,
    OutputColumns,
    Piece,
    RoutedColumns,
)
from shmllm.outputs.logprobs import LogprobColumns, PromptLogprobs
from shmllm.params.items import Item
from shmllm.params.lora import LoRARequest
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import RepetitionDetectionParams, SamplingParams
from shmllm.params.thinking import ThinkingBudget
from shmllm.wire import add, codec
from shmllm.wire import outputs as wire_outputs
from shmllm.wire.messages import (
    Abort,
    Call,
    Failed,
    Hello,
    Method,
    PromptEmbeds,
    PromptItem,
    RecordKind,
    Rejected,
    Reply,
    Text,
    Trace,
    Weights,
    WeightVersion,
    Work,
)

INF = float("inf")
int32 = st.integers(-(2**31), 2**31 - 1)
token_id = st.integers(0, 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
uint32 = st.integers(0, 2**32 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


positive = st.floats(0, exclude_min=True, allow_infinity=False)
alternatives = st.none() | st.integers(-1, 2**31 - 1)
token_sequence = st.lists(token_id, min_size=1, max_size=3).map(tuple)
thinking = st.builds(ThinkingBudget, st.integers(0, 2**31 - 1), *[token_sequence] * 3)
bad_words = st.lists(st.lists(token_id, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)


@st.composite
def detections(draw):
    most = draw(st.integers(1, 2**31 - 1))
    return RepetitionDetectionParams(
        most, draw(st.integers(0, most)), draw(st.integers(2, 2**31 - 1))
    )


def floats(count):
    return st.lists(st.floats(width=32), min_size=count, max_size=count).map(
        lambda values: np.array(values, np.float32)
    )


def ints(count):
    return st.lists(int32, min_size=count, max_size=count).map(
        lambda values: np.array(values, np.int32)
    )


@st.composite
def of_prompts(draw):
    """What is asked of the tokens of a prompt."""
    if draw(st.booleans()):
        return {"prompt_logprobs": draw(alternatives)}
    row = st.lists(st.integers(-1, 2**31 - 1), min_size=2, max_size=2)
    rows = draw(st.lists(row, min_size=1, max_size=3))
    start = draw(st.integers(0, 2**32 - 1))
    return {"prompt_logprob_token_ids": rows, "prompt_logprob_start": start}


@st.composite
def params(draw):
    max_tokens = draw(st.none() | st.integers(1, 2**32 - 1))
    scored = draw(st.none() | st.lists(token_id, min_size=1, max_size=4))
    return SamplingParams(
        temperature=draw(st.just(0.0) | st.floats(0.01, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        min_p=draw(st.floats(0, 1)),
        stop_token_ids=draw(st.lists(token_id, max_size=4)),
        ignore_eos=draw(st.booleans()),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 2**32 - 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.just(1.0) | positive),
        logprobs=draw(alternatives if scored is None else st.sampled_from([None, len(scored)])),
        **draw(of_prompts()),
        logprob_token_ids=scored,
        trace_decode_token_ids=draw(st.none() | st.lists(token_id, min_size=1, max_size=4)),
        logit_bias=draw(
            st.none()
            | st.dictionaries(
                token_id,
                st.floats(allow_nan=False).filter(lambda bias: bias < INF),
                min_size=1,
                max_size=4,
            )
        ),
        allowed_token_ids=draw(st.none() | st.lists(token_id, min_size=1, max_size=4)),
        repetition_detection=draw(st.none() | detections()),
        skip_reading_prefix_cache=draw(st.sampled_from([None, True])),
    )


@st.composite
def logprob_columns(draw, counts):
    rows = draw(st.sets(st.integers(0, len(counts) - 1))) if counts else ()
    rows = sorted(rows)
    ks = draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    tokens = sum(counts[row] for row in rows)
    entries = sum(counts[row] * k for row, k in zip(rows, ks, strict=True))
    return LogprobColumns(
        rows,
        ks,
        draw(floats(tokens)),
        draw(ints(tokens)),
        draw(ints(entries)),
        draw(floats(entries)),
    )


@st.composite
def prompt_logprobs(draw):
    tokens, k = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    return PromptLogprobs(
        draw(int64),
        draw(uint32),
        k,
        draw(floats(tokens)),
        draw(ints(tokens)),
        draw(ints(tokens * k)),
        draw(floats(tokens * k)),
    )


@st.composite
def outputs(draw):
    one_each = draw(st.booleans())
    counts = draw(st.lists(st.just(1) if one_each else st.integers(0, 5), max_size=8))
    rows = len(counts)
    cached_rows = draw(st.lists(st.integers(0, rows - 1), max_size=3)) if rows else []
    preempted_rows = draw(st.lists(st.integers(0, rows - 1), max_size=3)) if rows else []
    drafted_rows = draw(st.lists(st.integers(0, rows - 1), max_size=3)) if rows else []
    num_times = len(cached_rows) if draw(st.booleans()) else 0
    times = st.lists(int64, min_size=num_times, max_size=num_times)
    return OutputColumns(
        step=draw(int64),
        time_ns=draw(int64),
        numbers=draw(st.lists(int64, min_size=rows, max_size=rows)),
        counts=counts,
        finishes=draw(st.lists(st.sampled_from(FinishReason), min_size=rows, max_size=rows)),
        token_ids=draw(st.lists(int32, min_size=sum(counts), max_size=sum(counts))),
        cached_rows=cached_rows,
        cached_counts=draw(st.lists(int32, min_size=len(cached_rows), max_size=len(cached_rows))),
        queued_ns=draw(times),
        scheduled_ns=draw(times),
        preempted_rows=preempted_rows,
        preempted_counts=[draw(int32) for _ in preempted_rows],
        drafted_rows=drafted_rows,
        drafted_counts=[draw(int32) for _ in drafted_rows],
        accepted_counts=[draw(int32) for _ in drafted_rows],
        logprobs=draw(st.none() | logprob_columns(counts)),
    )


poolings = st.builds(
    Pooling,
    st.sampled_from(PoolingType),
    uint32,
    st.booleans(),
    st.booleans(),
    uses_head=st.booleans(),
    second_segment=uint32,
    num_skipped=uint32,
)


@st.composite
def embeddings(draw):
    numbers = draw(st.lists(int64, max_size=4))
    sizes = draw(st.lists(st.integers(0, 5), min_size=len(numbers), max_size=len(numbers)))
    pieces = [
        Piece(4 * draw(st.integers(0, 2**40)), draw(st.binary(min_size=4 * n, max_size=4 * n)))
        for n in sizes
    ]
    return Embeddings(numbers, pieces)


@st.composite
def routed_experts(draw):
    pieces = st.builds(Piece, st.integers(0, 2**40), st.binary(max_size=9))
    numbers = draw(st.lists(int64, max_size=4))
    return RoutedColumns(numbers, [draw(pieces) for _ in numbers])


@st.composite
def sampling_masks(draw):
    words = st.lists(st.binary(min_size=4, max_size=4), max_size=3).map(b"".join)
    numbers = draw(st.lists(int64, max_size=4))
    return MaskColumns(numbers, [Piece(0, draw(words)) for _ in numbers])


adapters = st.builds(
    lambda name, number, path: LoRARequest(name, number, path and f"/{path}"),
    st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=20),
    st.integers(1, 2**31 - 1),
    st.text("abc/é", max_size=20),
)


@st.composite
def prompt_items(draw: st.DrawFn) -> PromptItem:
    places = sorted(draw(st.sets(st.integers(0, 2**32 - 1), min_size=2, max_size=8)))
    spans = tuple(zip(places[::2], places[1::2], strict=False))
    grid = draw(st.tuples(*[st.integers(0, 2**32 - 1)] * 3))
    identity = st.binary(min_size=32, max_size=32)
    forgotten = draw(st.lists(identity, max_size=3))
    item = Item(draw(identity), spans, grid, is_embeds=draw(st.booleans()))
    return PromptItem(draw(int64), item, draw(st.binary(max_size=40)), forgotten)


MESSAGES = {
    RecordKind.HELLO: (codec.encode_hello, st.builds(Hello, uint32, uint32)),
    RecordKind.INIT: (codec.encode_text, st.builds(Text, text)),
    RecordKind.READY: (codec.encode_text, st.builds(Text, text)),
    RecordKind.FAILED: (codec.encode_failed, st.builds(Failed, text, text)),
    RecordKind.ADD: (
        codec.encode_add,
        st.builds(
            EngineCoreRequest,
            int64,
            st.lists(token_id, max_size=20),
            params(),
            text,
            int32,
            bad_words,
            text,
            st.none() | thinking,
            encoder_token_ids=st.just(()) | st.lists(token_id, min_size=1, max_size=5),
            lora=st.none() | adapters,
            seed=int64,
        ),
    ),
    RecordKind.POOL: (
        codec.encode_pool,
        st.builds(
            EngineCoreRequest,
            int64,
            st.lists(token_id, max_size=20),
            poolings,
            text,
            int32,
            encoder_token_ids=st.just(()) | st.lists(token_id, min_size=1, max_size=5),
            lora=st.none() | adapters,
        ),
    ),
    RecordKind.PROMPT_EMBEDS: (
        codec.encode_prompt_embeds,
        st.builds(PromptEmbeds, int64, st.binary(max_size=100)),
    ),
    RecordKind.PROMPT_ITEM: (codec.encode_prompt_item, prompt_items()),
    RecordKind.EMBEDDINGS: (codec.encode_pieces, embeddings()),
    RecordKind.ROUTED_EXPERTS: (codec.encode_pieces, routed_experts()),
    RecordKind.SAMPLING_MASKS: (codec.encode_pieces, sampling_masks()),
    RecordKind.ABORT: (codec.encode_abort, st.builds(Abort, st.lists(int64, max_size=9))),
    RecordKind.OUTPUTS: (codec.encode_outputs, outputs()),
    RecordKind.PROMPT_LOGPROBS: (codec.encode_prompt_logprobs, prompt_logprobs()),
    RecordKind.REJECTED: (codec.encode_rejected, st.builds(Rejected, int64, text, st.booleans())),
    RecordKind.CALL: (codec.encode_call, st.builds(Call, int64, st.sampled_from(Method), text)),
    RecordKind.WORK: (codec.encode_work, st.builds(Work, int64, text)),
    RecordKind.WEIGHTS: (
        codec.encode_weights,
        st.builds(
            Weights,
            st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**40)),
            text,
        ),
    ),
    RecordKind.WEIGHT_VERSION: (
        codec.encode_weight_version,
        st.builds(WeightVersion, int64 | text),
    ),
    RecordKind.TRACE: (codec.encode_trace, st.builds(Trace, text)),
    RecordKind.REPLY: (codec.encode_reply, st.builds(Reply, int64, st.booleans(), text)),
}
# Kinds whose last section extends to the end of the record, so added bytes cannot be noticed.
OPEN_ENDED = {
    RecordKind.TRACE,
    RecordKind.INIT,
    RecordKind.READY,
    RecordKind.FAILED,
    RecordKind.REJECTED,
    RecordKind.CALL,
    RecordKind.WORK,
    RecordKind.WEIGHTS,
    RecordKind.REPLY,
    RecordKind.PROMPT_EMBEDS,
}
kinds = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.name)


def record_of(kind, message):
    return b"".join(MESSAGES[kind][0](message))


def decode(kind, record):
    return codec.decode(kind, memoryview(record))


def test_every_kind_but_in_slot_is_tested_here():
    assert set(RecordKind) == {*MESSAGES, RecordKind.IN_SLOT}


@kinds
@pytest.mark.parametrize("num_examples", [20, slow(240)])
def test_a_message_can_be_encoded_and_decoded(kind, num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(data=st.data())
    def check(data):
        message = data.draw(MESSAGES[kind][1])
        decoded = decode(kind, record_of(kind, message))
        if isinstance(decoded, EngineCoreRequest):
            decoded.prompt_token_ids = list(decoded.prompt_token_ids)
        assert decoded == message

    check()


@kinds
@pytest.mark.parametrize("num_examples", [26, slow(320)])
def test_arbitrary_bytes_are_refused_or_decoded(kind, num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(record=st.binary(max_size=160))
    def check(record):
        with contextlib.suppress(ProtocolMismatchError):
            decode(kind, record)

    check()


@kinds
@pytest.mark.parametrize("num_examples", [20, slow(240)])
def test_damaged_bytes_are_refused_or_decoded(kind, num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(data=st.data())
    def check(data):
        record = bytearray(record_of(kind, data.draw(MESSAGES[kind][1])) or b"\0")
        for _ in range(data.draw(st.integers(1, 4))):
            record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(ProtocolMismatchError):
            decode(kind, record)

    check()


@pytest.mark.parametrize("kind", [k for k in MESSAGES if k not in OPEN_ENDED], ids=str)
@pytest.mark.parametrize("num_examples", [20, slow(160)])
def test_a_record_of_another_length_is_refused(kind, num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(data=st.data())
    def check(data):
        record = record_of(kind, data.draw(MESSAGES[kind][1]))
        # ABORT is an array of 8 bytes each: only another multiple of 8 is another message.
        cut = data.draw(st.integers(1, 7 if kind is RecordKind.ABORT else max(len(record), 1)))
        with pytest.raises(ProtocolMismatchError):
            decode(kind, record + b"\0" * min(cut, 7))
        if cut <= len(record):
            with pytest.raises(ProtocolMismatchError):
                decode(kind, record[:-cut])

    check()


@pytest.mark.parametrize(
    ("kind", "header_bytes"),
    [
        (RecordKind.FAILED, 4),
        (RecordKind.REJECTED, 12),
        (RecordKind.CALL, 12),
        (RecordKind.REPLY, 12),
    ],
    ids=["FAILED", "REJECTED", "CALL", "REPLY"],
)
def test_an_incomplete_header_is_refused(kind, header_bytes):
    for length in range(header_bytes):
        with pytest.raises(ProtocolMismatchError):
            decode(kind, b"\1" * length)
    decode(kind, bytes(4 if kind == RecordKind.FAILED else 8) + b"\1\0\0\0"[: header_bytes - 4])


@pytest.mark.parametrize("kind", [0, RecordKind.IN_SLOT, 99, -1, 2**32])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ProtocolMismatchError, match=f"kind {kind:d}"):
        decode(kind, b"")


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (RecordKind.INIT, b"\xff"),
        (RecordKind.FAILED, struct.pack("<I", 1) + b"\xc3"),
        (RecordKind.REJECTED, struct.pack("<q", 1) + b"\xe2\x82"),
        (RecordKind.REPLY, struct.pack("<qI", 1, 1) + b"\x80"),
    ],
    ids=["INIT", "FAILED", "REJECTED", "REPLY"],
)
def test_text_that_is_not_utf8_is_refused(kind, record):
    with pytest.raises(ProtocolMismatchError, match=kind.name):
        decode(kind, record)


def test_an_unknown_method_is_refused():
    with pytest.raises(ProtocolMismatchError, match="77"):
        decode(RecordKind.CALL, struct.pack("<qI", 1, 77))


def test_parameters_out_of_range_are_refused():
    record = bytearray(record_of(RecordKind.ADD, EngineCoreRequest(1, [5], SamplingParams())))
    struct.pack_into("<d", record, add.ADD_HEADER.size, float("nan"))
    with pytest.raises(ProtocolMismatchError, match="ADD: temperature"):
        decode(RecordKind.ADD, record)


@pytest.mark.parametrize("lengths", [(2, 2), (3, 0), (1, 1)], ids=str)
def test_inconsistent_bad_words_are_refused(lengths):
    message = EngineCoreRequest(1, [5], SamplingParams(), bad_words=((7,), (8, 9)))
    record = record_of(RecordKind.ADD, message)
    begin = add.ADD_HEADER.size + add.PARAMS.size
    assert struct.unpack_from("<IIiii", record, begin) == (1, 2, 7, 8, 9)
    record = bytearray(record)
    struct.pack_into("<II", record, begin, *lengths)
    with pytest.raises(ProtocolMismatchError, match="bad words"):
        decode(RecordKind.ADD, record)


def test_reasoning_that_never_ends_is_refused():
    message = EngineCoreRequest(
        1, [5], SamplingParams(), thinking=ThinkingBudget(3, (7,), (8,), (9,))
    )
    record = bytearray(record_of(RecordKind.ADD, message))
    place = add.ADD_HEADER.size + add.PARAMS.size - 24
    assert struct.unpack_from("<III", record, place) == (1, 1, 1)
    struct.pack_into("<III", record, place, 2, 0, 1)
    with pytest.raises(ProtocolMismatchError, match="reasoning"):
        decode(RecordKind.ADD, record)


def test_negative_tokens_in_bad_words_are_refused():
    message = EngineCoreRequest(1, [5], SamplingParams(), bad_words=((-7,),))
    with pytest.raises(ProtocolMismatchError, match="bad words"):
        decode(RecordKind.ADD, record_of(RecordKind.ADD, message))


@pytest.mark.parametrize("seed", [-1, 0, -(2**63), 2**63 - 1])
def test_each_seed_is_transmitted(seed):
    message = EngineCoreRequest(1, [5], SamplingParams(), seed=seed)
    assert decode(RecordKind.ADD, record_of(RecordKind.ADD, message)).seed == seed


def test_equal_parameters_are_decoded_once():
    records = [
        record_of(
            RecordKind.ADD,
            EngineCoreRequest(number, [5], SamplingParams(top_k=3, logit_bias={4: 1.5})),
        )
        for number in range(2)
    ]
    first, second = (decode(RecordKind.ADD, record).params for record in records)
    assert first is second


def test_large_parameters_are_not_kept():
    add._decode_params.cache_clear()  # a full one would have the same size, whatever comes
    for number in range(3):
        params = SamplingParams(stop_token_ids=list(range(number, 10_000)))
        request = EngineCoreRequest(number, [5], params)
        decoded = decode(RecordKind.ADD, record_of(RecordKind.ADD, request))
        assert decoded.params == params
    assert add._decode_params.cache_info().currsize == 0


@pytest.mark.parametrize("value", [2**31, 2**40])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_numbers_of_alternatives_are_limited_to_31_bits(name, value):
    record = record_of(RecordKind.ADD, EngineCoreRequest(1, [5], SamplingParams(**{name: value})))
    assert getattr(decode(RecordKind.ADD, record).params, name) == 2**31 - 1


def test_announced_sections_beyond_the_record_are_refused_without_being_read():
    record = bytearray(record_of(RecordKind.ADD, EngineCoreRequest(1, [5], SamplingParams())))
    for offset in range(20, add.ADD_HEADER.size, 4):
        damaged = bytearray(record)
        struct.pack_into("<I", damaged, offset, 2**32 - 1)
        with pytest.raises(ProtocolMismatchError, match="announces a section"):
            decode(RecordKind.ADD, damaged)
    for offset in range(add.ADD_HEADER.size + add.PARAMS.size - 32, len(record) - 4, 4):
        damaged = bytearray(record)
        struct.pack_into("<I", damaged, offset, 2**32 - 1)
        with pytest.raises(ProtocolMismatchError):
            decode(RecordKind.ADD, damaged)


def outputs_record(*, rows=2, cached=0, tokens=2, flags=1, body=b""):
    return wire_outputs.OUTPUTS_HEADER.pack(0, 0, rows, cached, tokens, flags) + body


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
def test_inconsistent_columns_are_refused(record):
    with pytest.raises(ProtocolMismatchError, match="are inconsistent"):
        decode(RecordKind.OUTPUTS, record)


def logprobs_record(rows, ks, tokens, entries, *, counts=(1, 1)):
    """An OUTPUTS record of two rows, whose log-probabilities have this header."""
    flags = wire_outputs.HAS_LOGPROBS | wire_outputs.NONE_FINISHED
    body = bytes(16 + 4 * sum(counts)) + array("H", counts).tobytes()
    body += wire_outputs.LOGPROBS_HEADER.pack(len(rows), tokens, entries)
    body += array("i", rows).tobytes() + array("i", ks).tobytes()
    body += bytes(8 * max(tokens, 0) + 8 * max(entries, 0))
    return outputs_record(tokens=sum(counts), flags=flags, body=body)


@pytest.mark.parametrize(
    "announced",
    [
        ([2], [0], 1, 0),
        ([-1], [0], 1, 0),
        ([1, 0], [0, 0], 2, 0),
        ([0, 0], [0, 0], 2, 0),
        ([0], [-1], 1, 0),
        ([0], [0], 2, 0),
        ([0], [2], 1, 1),
        ([0, 1], [2, 0], 2, 4),
    ],
    ids=str,
)
def test_logprobs_that_do_not_fit_the_rows_are_refused(announced):
    with pytest.raises(ProtocolMismatchError, match="log-probabilities of OUTPUTS"):
        decode(RecordKind.OUTPUTS, logprobs_record(*announced))


def test_logprobs_have_one_entry_for_each_token_of_a_row():
    columns = decode(
        RecordKind.OUTPUTS, logprobs_record([0, 1], [2, 0], 4, 6, counts=(3, 1))
    ).logprobs
    assert (len(columns.logprobs), len(columns.top_ids)) == (4, 6)


HISTORY = (
    *("cached_counts", "queued_ns", "scheduled_ns", "preempted_counts"),
    *("drafted_counts", "accepted_counts"),
)


def consistent(whole):
    """Columns whose lists of rows ascend, as the engine writes them."""
    whole.cached_rows = sorted(set(whole.cached_rows))
    whole.preempted_rows = sorted(set(whole.preempted_rows))
    for name in ("cached_counts", "queued_ns", "scheduled_ns"):
        setattr(whole, name, getattr(whole, name)[: len(whole.cached_rows)])
    whole.preempted_counts = whole.preempted_counts[: len(whole.preempted_rows)]
    whole.drafted_rows = sorted(set(whole.drafted_rows))
    for name in ("drafted_counts", "accepted_counts"):
        setattr(whole, name, getattr(whole, name)[: len(whole.drafted_rows)])
    return whole


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_columns_without_rows_are_the_others(data):
    whole = consistent(data.draw(outputs()))
    each = list(whole.parts(1))
    left_out = data.draw(st.sets(st.sampled_from(range(len(each))))) if each else set()
    pieces = whole.without(sorted(left_out))
    expected = [part for row, part in enumerate(each) if row not in left_out]
    for name in ("numbers", "counts", "finishes", "token_ids", *HISTORY):
        found, others = (
            [*itertools.chain.from_iterable(getattr(part, name) for part in parts)]
            for parts in (pieces, expected)
        )
        assert found == others


@settings(max_examples=60, deadline=None)
@given(data=st.data(), most=st.integers(1, 4))
def test_the_parts_of_columns_have_the_contents_of_the_whole(data, most):
    whole = consistent(data.draw(outputs()))
    parts = list(whole.parts(most))
    assert all(len(part.numbers) <= most for part in parts)
    for name in ("numbers", "counts", "finishes", "token_ids", *HISTORY):
        joined = itertools.chain.from_iterable(getattr(part, name) for part in parts)
        assert list(joined) == getattr(whole, name)
    whole_logprobs = whole.logprobs or LogprobColumns([], [], *[np.zeros(0)] * 4)
    taken = [part.logprobs for part in parts if part.logprobs is not None]
    assert [k for each in taken for k in each.ks] == whole_logprobs.ks
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        joined = np.concatenate([np.zeros(0), *(getattr(each, name) for each in taken)])
        assert np.array_equal(joined, getattr(whole_logprobs, name), equal_nan=True)
    for part in parts:
        decode(RecordKind.OUTPUTS, record_of(RecordKind.OUTPUTS, part))


@settings(max_examples=40, deadline=None)
@given(whole=prompt_logprobs(), most=st.integers(1, 100))
def test_the_parts_of_prompt_logprobs_have_the_contents_of_the_whole(whole, most):
    parts = list(whole.parts(most))
    assert [part.first for part in parts] == [
        whole.first + sum(len(p.logprobs) for p in parts[:i]) for i in range(len(parts))
    ]
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        joined = np.concatenate([np.zeros(0), *(getattr(each, name) for each in parts)])
        assert np.array_equal(joined, getattr(whole, name), equal_nan=True)
    if whole.k:
        per_token = 8 + 8 * whole.k
        assert all(len(part.logprobs) <= max(most // per_token, 1) for part in parts)


def test_a_step_with_one_token_each_has_no_counts():
    one_each = OutputColumns(numbers=[1, 2], counts=[1, 1], finishes=[0, 0], token_ids=[5, 6])
    mixed = OutputColumns(numbers=[1, 2], counts=[0, 2], finishes=[0, 0], token_ids=[5, 6])
    lengths = [len(record_of(RecordKind.OUTPUTS, message)) for message in (one_each, mixed)]
    assert lengths[1] - lengths[0] == 2 * 2


def test_only_a_record_that_ends_a_drafted_request_has_the_counts_of_drafts():
    ends = {"counts": [1, 1], "finishes": [0, 1], "token_ids": [5, 6]}
    plain = OutputColumns(numbers=[1, 2], **ends)
    drafted = OutputColumns(
        numbers=[1, 2], **ends, drafted_rows=[1], drafted_counts=[9], accepted_counts=[4]
    )
    lengths = [len(record_of(RecordKind.OUTPUTS, message)) for message in (plain, drafted)]
    assert lengths[1] - lengths[0] == 4 * 4


@pytest.mark.parametrize("name", ["cached", "preempted", "drafted"])
@pytest.mark.parametrize("row", [-1, 1])
def test_counts_of_rows_that_do_not_exist_are_refused(name, row):
    columns = OutputColumns(numbers=[7], counts=[1], finishes=[1], token_ids=[5])
    setattr(columns, f"{name}_rows", [row])
    setattr(columns, f"{name}_counts", [2])
    columns.accepted_counts = [1]
    with pytest.raises(ProtocolMismatchError, match="columns of OUTPUTS are inconsistent"):
        decode(RecordKind.OUTPUTS, record_of(RecordKind.OUTPUTS, columns))


def test_a_decoded_message_does_not_refer_to_the_record():
    record = bytearray(
        record_of(RecordKind.ADD, EngineCoreRequest(1, [5, 6], SamplingParams(), "salt"))
    )
    view = memoryview(record)
    message = codec.decode(RecordKind.ADD, view)
    view.release()
    record.clear()
    assert list(message.prompt_token_ids) == [5, 6]
    assert message.cache_salt == "salt"


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens"])
def test_numbers_of_tokens_are_limited_to_32_bits(name):
    wanted = SamplingParams(max_tokens=2**40, min_tokens=2**40 if name == "min_tokens" else 0)
    received = decode(RecordKind.ADD, record_of(RecordKind.ADD, EngineCoreRequest(1, [5], wanted)))
    assert getattr(received.params, name) == 2**32 - 1


@pytest.mark.parametrize("top_k", [2**31, 2**40])
def test_a_top_k_above_31_bits_keeps_every_token(top_k):
    record = record_of(RecordKind.ADD, EngineCoreRequest(1, [5], SamplingParams(top_k=top_k)))
    received = decode(RecordKind.ADD, record).params.top_k
    assert received <= 0 or received == 2**31 - 1


@given(ref=st.tuples(uint32, uint32, uint32))
def test_a_slot_reference_can_be_encoded_and_decoded(ref):
    record = b"".join(codec.encode_in_slot(RecordKind.ADD, ref))
    assert codec.decode_in_slot(memoryview(record)) == (RecordKind.ADD, ref)


def test_a_slot_reference_to_a_slot_reference_is_refused():
    (record,) = codec.encode_in_slot(RecordKind.IN_SLOT, (0, 0, 0))
    with pytest.raises(ProtocolMismatchError, match="reference"):
        codec.decode_in_slot(memoryview(record))


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_slot_reference_of_another_length_is_refused(length):
    with pytest.raises(ProtocolMismatchError, match="16 bytes"):
        codec.decode_in_slot(memoryview(bytes(length)))


def test_extra_arguments_are_those_of_one_request_only():
    shared = SamplingParams(temperature=0)
    with_arguments = EngineCoreRequest(1, [2], shared, extra_args='{"a": [1, null, "é"]}')
    first = add.decode_add(memoryview(b"".join(add.encode_add(with_arguments))))
    assert first.params.extra_args == {"a": [1, None, "é"]}
    second = add.decode_add(memoryview(b"".join(add.encode_add(EngineCoreRequest(2, [2], shared)))))
    assert second.params.extra_args is None


@pytest.mark.parametrize(
    "text", ["[1]", "{", "[" * 60_000, '{"a": "' + "x" * 2**16 + '"}'], ids=lambda text: text[:8]
)
def test_extra_arguments_that_are_no_small_object_are_refused(text):
    request = EngineCoreRequest(1, [2], SamplingParams(temperature=0), extra_args=text)
    record = memoryview(b"".join(add.encode_add(request)))
    with pytest.raises(ProtocolMismatchError, match="extra arguments of ADD"):
        add.decode_add(record)


@pytest.mark.parametrize("lora", ["[]", "{}", '["a", 0, "/x"]', '["", 1, "/x"]', "[1, 1, 1]", "x"])
def test_an_invalid_adapter_is_refused(lora):
    parts = codec.encode_add(
        EngineCoreRequest(1, [5], SamplingParams(), lora=LoRARequest("a", 1, "/x"))
    )
    header = list(add.ADD_HEADER.unpack(parts[0]))
    header[-1] = len(lora)
    with pytest.raises(ProtocolMismatchError, match="ADD's adapter"):
        decode(
            RecordKind.ADD, b"".join((add.ADD_HEADER.pack(*header), *parts[1:-1], lora.encode()))
        )


def test_the_fields_of_an_adapter_arrive():
    sent = EngineCoreRequest(1, [5], SamplingParams(), lora=LoRARequest("a", 7, "/x"))
    received = decode(RecordKind.ADD, record_of(RecordKind.ADD, sent)).lora
    assert (received.lora_name, received.lora_int_id, received.lora_path) == ("a", 7, "/x")
