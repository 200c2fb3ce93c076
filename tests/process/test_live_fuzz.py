"""A named engine cuts off a front end that writes invalid records, and serves the others.

The fuzzer knows what each record is worth: the codec in this process says whether a record
is a message that a front end may send. It has to be cut off exactly if it wrote one that is
not, and another front end's greedy tokens have to stay what they were.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from struct import pack

import pytest
from support.engines import assert_unused, named_engine
from support.programs import is_running
from support.raw_front_end import RawFrontEnd, in_slot
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.errors import ProtocolMismatchError, RequestError
from shmllm.ipc import layout
from shmllm.ipc.layout import RECORD_HEADER
from shmllm.ipc.slots import SlotRef
from shmllm.ipc.states import Answer, DoorbellKind
from shmllm.ipc.tensor_ref import TensorRef
from shmllm.params.items import Item
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.wire import codec
from shmllm.wire.messages import (
    Abort,
    Call,
    Method,
    PromptEmbeds,
    PromptItem,
    RecordKind,
    Weights,
    Work,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

VOCABULARY = 250
MANY_RECORDS = 100_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The engine of all tests of this module."""
    with named_engine(tmp_path_factory.mktemp("fuzz")) as found:
        yield found


@pytest.fixture
def name(engine: tuple[str, int]) -> Iterator[str]:
    """A running engine, which has to be alive and unused when the test is over."""
    name, pid = engine
    yield name
    assert is_running(pid)
    assert_unused(name)


def greedy(llm: LLM) -> list[int]:
    return llm.generate("import os\n", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


class Fuzzer:
    """Makes records, and knows which of them end the connection."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._number = 0
        self.added: set[int] = set()

    def record(self, front_end: RawFrontEnd) -> tuple[int, bytes, bool]:
        """(kind, record, whether it ends the connection)."""
        kind, record = self._source.choice(
            (
                self._add,
                self._add,
                self._pool,
                self._abort,
                self._call,
                self._work,
                self._embeds,
                self._item,
                self._weights,
                self._noise,
                self._reference,
            )
        )(front_end)
        if kind != RecordKind.IN_SLOT and self._source.random() < 0.5:
            kind, record = self._mutate(kind, record)
        return kind, record, self._is_fatal(kind, record)

    def abort_all(self) -> bytes:
        """ABORT for every request that the engine may have taken."""
        (record,) = codec.encode_abort(Abort(sorted(self.added)))
        self.added.clear()
        return record

    def _is_fatal(self, kind: int, record: bytes) -> bool:
        try:
            message = codec.decode(kind, memoryview(record))
        except ProtocolMismatchError:
            return True
        if isinstance(message, EngineCoreRequest):
            self.added.add(message.number)
        # PROMPT_EMBEDS, PROMPT_ITEM and WEIGHTS are fatal here: none of their references names a
        # lent slot, and no item is known.
        return not isinstance(message, EngineCoreRequest | EngineCoreRequest | Abort | Call | Work)

    def _add(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        source = self._source
        self._number += 1
        prompt = [source.randrange(VOCABULARY) for _ in range(source.randrange(1, 12))]
        params = SamplingParams(
            temperature=source.choice((0.0, 0.8)),
            max_tokens=source.randrange(1, 4),
            stop_token_ids=[source.randrange(VOCABULARY)],
        )
        return RecordKind.ADD, b"".join(
            codec.encode_add(EngineCoreRequest(self._number, prompt, params, "s"))
        )

    def _pool(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        source = self._source
        self._number += 1
        prompt = [source.randrange(VOCABULARY) for _ in range(source.randrange(1, 12))]
        pooling = Pooling(source.choice(list(PoolingType)), source.randrange(300))
        message = EngineCoreRequest(self._number, prompt, pooling, "s", source.randrange(-9, 9))
        return RecordKind.POOL, b"".join(codec.encode_pool(message))

    def _work(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        """A call on the worker; this engine runs no functions of its front ends."""
        source = self._source
        self._number += 1
        method = source.choice(("check_health", "list_weights", "get_weight", "nothing", None))
        args = source.choice(([], ["model.norm.weight"], [{"$": "tensor", "at": 0}], [[[]]]))
        tree = source.choice(
            (
                {"method": method, "args": args, "kwargs": {}},
                {"function": {"$": "bytes", "at": 0}},
                {"method": method},
                [],
            )
        )
        slot = [source.randrange(-1, 30), source.choice((0, 64, -1)), source.choice((0, 2**62))]
        tensors = source.choice((None, None, 7, [slot, []], [slot, [["uint8", [5], 0]]]))
        text = json.dumps({"tree": tree, "tensors": tensors})
        return RecordKind.WORK, b"".join(codec.encode_work(Work(2**40 + self._number, text)))

    def _embeds(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        """A reference to a slot that was not lent."""
        source = self._source
        self._number += 1
        shape = (source.randrange(4), source.choice((0, 256)))
        nbytes = source.choice((4 * shape[0] * shape[1], source.randrange(10**6)))
        ref = TensorRef(SlotRef(source.randrange(40), 0, nbytes), "float32", shape).encode()
        message = PromptEmbeds(self._number, ref)
        return RecordKind.PROMPT_EMBEDS, b"".join(codec.encode_prompt_embeds(message))

    def _item(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        """An image that nobody sent, or a reference to a slot that was not lent."""
        source = self._source
        self._number += 1
        shape = (1, source.randrange(9), 8, 3)
        slot = SlotRef(source.randrange(40), 0, source.choice((24 * shape[1], 10**6)))
        ref = source.choice((b"", TensorRef(slot, "uint8", shape).encode()))
        begin, length = source.randrange(99), source.randrange(1, 99)
        grid = (1, source.randrange(3), source.choice((1, 2**32 - 1)))
        item = Item(source.randbytes(32), ((begin, begin + length),), grid)
        forgotten = [source.randbytes(32) for _ in range(source.randrange(3))]
        message = PromptItem(self._number, item, ref, forgotten)
        return RecordKind.PROMPT_ITEM, b"".join(codec.encode_prompt_item(message))

    def _weights(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        """A reference to a slot that was not lent."""
        slot = self._source.randrange(40), 0, self._source.randrange(10**6)
        message = Weights(slot, json.dumps([["a", "float32", [1], 0, 1, 0]]))
        return RecordKind.WEIGHTS, b"".join(codec.encode_weights(message))

    def _abort(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        numbers = [self._source.randrange(self._number + 2) for _ in range(3)]
        return RecordKind.ABORT, b"".join(codec.encode_abort(Abort(numbers)))

    def _call(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        self._number += 1
        call = Call(2**40 + self._number, Method.RESET_PREFIX_CACHE)
        return RecordKind.CALL, b"".join(codec.encode_call(call))

    def _noise(self, _front_end: RawFrontEnd) -> tuple[int, bytes]:
        source = self._source
        kind = source.choice((source.randrange(16), source.randrange(layout.PADDING_KIND)))
        if kind == RecordKind.IN_SLOT:
            kind = 0
        length = source.choice((0, 1, 8, 12, 16, 72, source.randrange(5000)))
        return kind, source.randbytes(length)

    def _reference(self, front_end: RawFrontEnd) -> tuple[int, bytes]:
        """An invalid slot reference; each ends the connection, like a nested one."""
        source = self._source
        kind = source.choice(
            (RecordKind.ADD, RecordKind.ABORT, RecordKind.CALL, RecordKind.IN_SLOT)
        )
        slot = source.choice((0, layout.NUM_SLOTS, 2**32 - 1, source.randrange(2**32)))
        record = pack("<IIII", kind, slot, source.randrange(2**32), source.randrange(2**32))
        return RecordKind.IN_SLOT, record[: source.choice((16, 16, 16, 15, 0))]

    def _mutate(self, kind: int, record: bytes) -> tuple[int, bytes]:
        source = self._source
        damaged = bytearray(record)
        match source.randrange(5):
            case 0:  # cut short
                del damaged[source.randrange(len(damaged) + 1) :]
            case 1:  # drawn out
                damaged += source.randbytes(source.randrange(1, 40))
            case 2:  # under another kind
                kind = source.choice([k for k in RecordKind if k not in (kind, RecordKind.IN_SLOT)])
            case 3:  # extreme values, where the counts and the parameters are
                for _ in range(source.randrange(1, 3)):
                    at = 4 * source.randrange(max(1, len(damaged) // 4))
                    value = source.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x7FF80000))
                    damaged[at : at + 4] = struct.pack("<I", value)
            case _:
                for _ in range(source.randrange(1, 6)):
                    if damaged:
                        damaged[source.randrange(len(damaged))] = source.randrange(256)
        return kind, bytes(damaged)


def fuzz(name: str, num_records: int) -> None:
    faulthandler.cancel_dump_traceback_later()  # a hundred thousand take minutes
    seed = int(os.environ.get("SHMLLM_STRESS_SEED", 17))
    print(f"seed {seed}")
    fuzzer = Fuzzer(random.Random(seed))
    num_written = num_cut_off = num_checks = 0
    num_descriptors = 0
    with LLM.attach(name) as other:
        expected = greedy(other)
        pid = other._client.pid
        front_end = RawFrontEnd(name).enter()
        while num_written < num_records:
            kind, record, is_fatal = fuzzer.record(front_end)
            front_end.write(kind, record)
            num_written += 1
            if num_written % (num_records // 50) == 0:
                assert greedy(other) == expected
                num_checks += 1
            if is_fatal:
                front_end.check_cut_off()
                num_cut_off += 1
                fuzzer.added.clear()
                front_end = RawFrontEnd(name).enter()
                if num_cut_off == 20:
                    num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            elif num_written % 5 == 0:
                front_end.write(RecordKind.ABORT, fuzzer.abort_all())
                front_end.check_served()
                front_end.client.poll(0).clear()
        front_end.check_served()
        front_end.client.close()
        assert greedy(other) == expected
        assert holds_within(lambda: other.get_metrics()["running"] == 0, PATIENCE_S)
        assert len(os.listdir(f"/proc/{pid}/fd")) <= num_descriptors, "descriptors leak"
    print(f"{num_written} records, cut off {num_cut_off} times, {num_checks} checks between")
    assert num_cut_off > num_records // 10


def test_random_records_cut_off_their_writer_only(name: str) -> None:
    fuzz(name, 250)


@pytest.mark.stress
def test_a_hundred_thousand_random_records(name: str) -> None:
    fuzz(name, MANY_RECORDS)


def test_a_slot_holds_a_message_or_ends_the_connection(name: str) -> None:
    call = b"".join(codec.encode_call(Call(2**50, Method.RESET_PREFIX_CACHE)))
    with LLM.attach(name) as other:
        expected = greedy(other)
        good = RawFrontEnd(name).enter()
        for _ in range(2 * layout.NUM_SLOTS):
            in_slot(good, RecordKind.CALL, call)
            good.check_served()
        good.client.close()
        for kind, record in [
            (RecordKind.CALL, call[:11]),
            (RecordKind.ADD, call),
            (99, call),
            (0, b"x"),
            (RecordKind.PROMPT_ITEM, bytes(2**22 + 1)),
        ]:
            bad = RawFrontEnd(name).enter()
            in_slot(bad, kind, record)
            bad.check_cut_off()
            assert greedy(other) == expected


def bucket(front_end: RawFrontEnd, pieces: str) -> None:
    slot = front_end.channel.slots.claim(4096)
    assert slot is not None
    record = codec.encode_weights(Weights(slot.publish(), pieces))
    front_end.write(RecordKind.WEIGHTS, b"".join(record))


def test_a_bucket_of_weights_is_one_or_ends_the_connection(name: str) -> None:
    piece = ["model.norm.weight", "float32", [256], 0, 256, 0]
    with LLM.attach(name) as other:
        expected = greedy(other)
        good = RawFrontEnd(name).enter()
        for _ in range(2 * layout.NUM_SLOTS):  # of no update: passed over, and the slot goes back
            bucket(good, json.dumps([piece]))
            good.check_served()
        good.client.call(Method.START_WEIGHTS)
        bucket(good, json.dumps([["no.such", "int8", [256], 0, 1, 0]]))
        with pytest.raises(RequestError, match="no weight"):
            good.client.call(Method.FINISH_WEIGHTS, {})
        good.client.close()
        wrong = [[[]], [[*piece[:4], 1025, 0]], [[3, *piece[1:]]]]
        for pieces in ("", *map(json.dumps, wrong)):
            bad = RawFrontEnd(name).enter()
            bad.client.call(Method.START_WEIGHTS)
            bucket(bad, pieces)
            bad.check_cut_off()
            assert greedy(other) == expected
        assert other.get_weight_version() == 0


def damaged_header(*header: int) -> Callable[[RawFrontEnd], None]:
    """A record of 32 bytes of a good CALL whose header is then replaced before it shows."""

    def damage(front_end: RawFrontEnd) -> None:
        position = front_end.word(layout.REQUEST_PUBLISHED_OFFSET).load()
        begin = layout.REQUEST_RING_OFFSET + position % layout.RING_BYTES
        values = [position if value == AT_POSITION else value for value in header]
        RECORD_HEADER.pack_into(front_end.memory, begin, *values)
        front_end.store(layout.REQUEST_PUBLISHED_OFFSET, position + 32)

    return damage


def moved_cursor(distance: int) -> Callable[[RawFrontEnd], None]:
    def damage(front_end: RawFrontEnd) -> None:
        position = front_end.word(layout.REQUEST_PUBLISHED_OFFSET).load()
        front_end.store(layout.REQUEST_PUBLISHED_OFFSET, (position + distance) % 2**64)

    return damage


def lent_twice(front_end: RawFrontEnd) -> None:
    in_a_slot = layout.REQUEST_SLOT_TABLE_OFFSET
    front_end.store(in_a_slot + layout.SLOT_PUBLISHED_OFFSET, 2**64 - 1)
    front_end.store(in_a_slot + layout.SLOT_PAYLOAD_OFFSET, 2**64 - 1)
    front_end.write(RecordKind.IN_SLOT, pack("<IIII", RecordKind.ADD, 0, 0, 16))


def behind_its_slot(front_end: RawFrontEnd) -> None:
    in_a_slot = layout.REQUEST_SLOT_TABLE_OFFSET
    front_end.store(in_a_slot + layout.SLOT_PUBLISHED_OFFSET, 1)
    front_end.store(in_a_slot + layout.SLOT_PAYLOAD_OFFSET, 2**64 - 1)
    nbytes = layout.SMALL_SLOT_BYTES + 1
    front_end.write(RecordKind.IN_SLOT, pack("<IIII", RecordKind.ADD, 0, 0, nbytes))


AT_POSITION = -1
DAMAGES = {
    "header that is longer than the ring": damaged_header(2**32 - 1, 9, 0, AT_POSITION),
    "header that is longer than what is published": damaged_header(17, 9, 0, AT_POSITION),
    "header of another position": damaged_header(12, 9, 0, 2**64 - 16),
    "header with flags": damaged_header(12, 9, 1, AT_POSITION),
    "padding that leaves the ring": damaged_header(2**31, layout.PADDING_KIND, 0, AT_POSITION),
    "two empty records": damaged_header(0, 9, 0, AT_POSITION),
    "cursor that is not aligned": moved_cursor(1),
    "cursor that went back": moved_cursor(-16),
    "cursor a lap ahead": moved_cursor(layout.RING_BYTES + 16),
    "cursor at the end of time": moved_cursor(2**64 - 2**20),
    "cursor over bytes nobody wrote": moved_cursor(4096),
    "slot lent twice": lent_twice,
    "slot larger than it is": behind_its_slot,
}


def test_damaged_cursors_headers_and_slots_cut_off_their_owner_only(name: str) -> None:
    with LLM.attach(name) as other:
        expected = greedy(other)
        for what, damage in DAMAGES.items():
            front_end = RawFrontEnd(name).enter()
            front_end.check_served()
            damage(front_end)
            assert holds_within(front_end.is_cut_off, PATIENCE_S), what
            front_end.check_cut_off()
            assert greedy(other) == expected, what


def test_the_engine_does_not_trust_its_own_words_in_the_segment(name: str) -> None:
    """The engine keeps what it writes itself, so this damage only affects the front end."""
    with LLM.attach(name) as other:
        expected = greedy(other)
        for offset in (layout.REQUEST_CONSUMED_OFFSET, layout.OUTPUT_PUBLISHED_OFFSET):
            front_end = RawFrontEnd(name).enter()
            front_end.store(offset, 2**64 - 1)
            assert greedy(other) == expected
            front_end.client.close()
        front_end = RawFrontEnd(name).enter()
        front_end.store(layout.CLIENT_PARKED_OFFSET, 2**64 - 1)
        front_end.check_served()
        front_end.client.close()


@pytest.mark.parametrize(
    "consumed",
    [
        pytest.param(2**63, marks=pytest.mark.slow),
        8,
        pytest.param(2**64 - 16, marks=pytest.mark.slow),
    ],
)
def test_a_damaged_cursor_of_the_output_ring_cuts_off_its_owner_only(
    name: str, consumed: int
) -> None:
    with LLM.attach(name) as other:
        expected = greedy(other)
        front_end = RawFrontEnd(name).enter()
        front_end.store(layout.OUTPUT_CONSUMED_OFFSET, consumed)
        call = b"".join(codec.encode_call(Call(1, Method.RESET_PREFIX_CACHE)))
        deadline = time.monotonic() + PATIENCE_S
        while not front_end.is_cut_off() and time.monotonic() < deadline:
            front_end.channel.try_send(RecordKind.CALL, call)  # until the output ring looks full
        front_end.check_cut_off()
        assert greedy(other) == expected


def test_a_cursor_damaged_while_outputs_wait_cuts_off_its_owner_only(name: str) -> None:
    """The engine reads the damaged cursor when it looks for room, not when it reads requests."""
    with LLM.attach(name) as other:
        expected = greedy(other)
        front_end = RawFrontEnd(name).enter()
        call = b"".join(codec.encode_call(Call(1, Method.RESET_PREFIX_CACHE)))
        published = front_end.channel.outputs._published
        deadline = time.monotonic() + PATIENCE_S
        while published.load() < layout.RING_BYTES - 64 and time.monotonic() < deadline:
            front_end.channel.try_send(RecordKind.CALL, call)
        assert published.load() >= layout.RING_BYTES - 64
        front_end.store(layout.OUTPUT_CONSUMED_OFFSET, 2**63)
        assert holds_within(front_end.is_cut_off, PATIENCE_S)
        front_end.client.close()
        assert greedy(other) == expected


def test_an_impossible_pid_is_ignored(name: str) -> None:
    """A lock says whether a front end lives; the engine must accept any number as its pid."""
    front_end = RawFrontEnd(name)
    front_end.store(layout.CREATOR_PID_OFFSET, 2**40)
    front_end.enter()
    front_end.check_served()
    front_end.client.close()


def test_a_damaged_state_word_cuts_off_its_owner_only(name: str) -> None:
    with LLM.attach(name) as other:
        expected = greedy(other)
        front_end = RawFrontEnd(name).enter()
        front_end.store(layout.CLIENT_STATE_OFFSET, 4711)
        assert holds_within(lambda: front_end.answer is not Answer.ACCEPTED, PATIENCE_S)
        front_end.client.close()
        assert greedy(other) == expected


def named_doorbell(front_end: RawFrontEnd) -> None:
    begin = layout.CLIENT_DOORBELL_OFFSET + layout.DOORBELL_NAME_OFFSET
    front_end.memory[begin : begin + 7] = b"/a/b/c\0"
    front_end.store(layout.CLIENT_DOORBELL_OFFSET, DoorbellKind.NAMED)


def stored(offset: int, value: int) -> Callable[[RawFrontEnd], None]:
    return lambda front_end: front_end.store(offset, value)


@pytest.mark.parametrize(
    "damage",
    [
        stored(layout.VERSION_OFFSET, 99),
        stored(layout.CLIENT_DOORBELL_OFFSET, 99),
        named_doorbell,
        stored(layout.OUTPUT_CONSUMED_OFFSET, 2**40),
    ],
    ids=["version", "doorbell", "doorbell name", "consumed"],
)
def test_a_segment_damaged_before_attaching_is_refused(
    name: str, damage: Callable[[RawFrontEnd], None]
) -> None:
    with LLM.attach(name) as other:
        expected = greedy(other)
        front_end = RawFrontEnd(name)
        damage(front_end)
        with pytest.raises(EngineStartError, match="could not open this front end's segment"):
            front_end.enter()
        assert greedy(other) == expected
