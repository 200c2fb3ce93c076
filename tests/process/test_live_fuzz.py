"""A front end that writes nonsense at a named engine: it is cut off, and nobody else notices.

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
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, EngineDeadError, EngineStartError, SamplingParams
from shmllm.client.attached import AttachedEngineClient
from shmllm.errors import ProtocolMismatchError, RequestError
from shmllm.ipc import layout
from shmllm.ipc.layout import RECORD_HEADER, Refusal
from shmllm.ipc.slots import SlotRef
from shmllm.ipc.tensor_ref import TensorRef
from shmllm.ipc.words import Word
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.wire import codec
from shmllm.wire.messages import Abort, Call, Method, PromptEmbeds, RecordKind, Weights, Work

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CUT_OFF = "sent invalid messages"
VOCABULARY = 250
MANY_RECORDS = 100_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """All that is done to it here has to leave it as it was."""
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


class Seat:
    """A front end that can write anything into its own segment."""

    def __init__(self, name: str) -> None:
        self.client = AttachedEngineClient(name)
        self.channel = self.client._channel
        self.memory = self.channel._client.buffer

    def enter(self) -> Seat:
        self.client.wait_ready()
        return self

    def write(self, kind: int, record: bytes) -> None:
        self.channel.send(kind, record, on_full=self._no_room, deadline=None)

    def _no_room(self) -> None:
        raise AssertionError("the engine does not read")

    def word(self, offset: int) -> Word:  # type: ignore[valid-type]
        return Word(self.memory, offset)

    def store(self, offset: int, value: int) -> None:
        word = self.word(offset)
        word.store(value)
        word.close()

    def is_cut_off(self) -> bool:
        return self.client._view.accepted(self.client._place) == Refusal.BROKEN_PROTOCOL

    def check_cut_off(self) -> None:
        """It was, and says so in its own words."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_cut_off():  # looked at often: it happens tens of thousands of times
            assert time.monotonic() < deadline, "it was not cut off"
            time.sleep(0.0002)
        with pytest.raises(EngineDeadError, match=CUT_OFF):  # noqa: PT012
            while time.monotonic() < deadline:  # outputs from before come first
                self.client.poll(0.0005)
        self.client.close()

    def check_served(self) -> None:
        """It was not cut off: a question is answered behind all that it sent."""
        assert self.client.call(Method.RESET_PREFIX_CACHE) in (True, False)
        assert not self.is_cut_off()


class Fuzzer:
    """Makes records, and knows which of them end the connection."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._number = 0
        self.added: set[int] = set()

    def record(self, seat: Seat) -> tuple[int, bytes, bool]:
        """(kind, record, whether it ends the connection); never asks the engine to end."""
        while True:
            kind, record = self._source.choice(
                (
                    self._add,
                    self._add,
                    self._pool,
                    self._abort,
                    self._call,
                    self._work,
                    self._embeds,
                    self._weights,
                    self._noise,
                    self._reference,
                )
            )(seat)
            if kind != RecordKind.IN_SLOT and self._source.random() < 0.5:
                kind, record = self._mutate(kind, record)
            if kind == RecordKind.SHUTDOWN:
                continue
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
        # PROMPT_EMBEDS and WEIGHTS are fatal here: none of their references names a lent slot.
        return not isinstance(message, EngineCoreRequest | EngineCoreRequest | Abort | Call | Work)

    def _add(self, _seat: Seat) -> tuple[int, bytes]:
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

    def _pool(self, _seat: Seat) -> tuple[int, bytes]:
        source = self._source
        self._number += 1
        prompt = [source.randrange(VOCABULARY) for _ in range(source.randrange(1, 12))]
        pooling = Pooling(source.choice(list(PoolingType)), source.randrange(300))
        message = EngineCoreRequest(self._number, prompt, pooling, "s", source.randrange(-9, 9))
        return RecordKind.POOL, b"".join(codec.encode_pool(message))

    def _work(self, _seat: Seat) -> tuple[int, bytes]:
        """No engine runs functions of a front end that it does not trust."""
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

    def _embeds(self, _seat: Seat) -> tuple[int, bytes]:
        """Of a slot that is not lent."""
        source = self._source
        self._number += 1
        shape = (source.randrange(4), source.choice((0, 256)))
        nbytes = source.choice((4 * shape[0] * shape[1], source.randrange(10**6)))
        ref = TensorRef(SlotRef(source.randrange(40), 0, nbytes), "float32", shape).encode()
        message = PromptEmbeds(self._number, ref)
        return RecordKind.PROMPT_EMBEDS, b"".join(codec.encode_prompt_embeds(message))

    def _weights(self, _seat: Seat) -> tuple[int, bytes]:
        """Of a slot that is not lent."""
        slot = self._source.randrange(40), 0, self._source.randrange(10**6)
        message = Weights(slot, json.dumps([["a", "float32", [1], 0, 1, 0]]))
        return RecordKind.WEIGHTS, b"".join(codec.encode_weights(message))

    def _abort(self, _seat: Seat) -> tuple[int, bytes]:
        numbers = [self._source.randrange(self._number + 2) for _ in range(3)]
        return RecordKind.ABORT, b"".join(codec.encode_abort(Abort(numbers)))

    def _call(self, _seat: Seat) -> tuple[int, bytes]:
        self._number += 1
        call = Call(2**40 + self._number, Method.RESET_PREFIX_CACHE)
        return RecordKind.CALL, b"".join(codec.encode_call(call))

    def _noise(self, _seat: Seat) -> tuple[int, bytes]:
        source = self._source
        kind = source.choice((source.randrange(16), source.randrange(layout.PADDING_KIND)))
        if kind == RecordKind.IN_SLOT:
            kind = 0
        length = source.choice((0, 1, 8, 12, 16, 72, source.randrange(5000)))
        return kind, source.randbytes(length)

    def _reference(self, seat: Seat) -> tuple[int, bytes]:
        """A reference to nowhere; all of them end the connection, like a nested one."""
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
    seed = int(os.environ.get("SHMLLM_STRESS_SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    fuzzer = Fuzzer(random.Random(seed))
    num_written = num_cut_off = num_checks = 0
    num_descriptors = 0
    with LLM.attach(name) as other:
        expected = greedy(other)
        pid = other._client.pid
        seat = Seat(name).enter()
        while num_written < num_records:
            kind, record, is_fatal = fuzzer.record(seat)
            seat.write(kind, record)
            num_written += 1
            if num_written % (num_records // 50) == 0:
                assert greedy(other) == expected
                num_checks += 1
            if is_fatal:
                seat.check_cut_off()
                num_cut_off += 1
                fuzzer.added.clear()
                seat = Seat(name).enter()
                if num_cut_off == 20:
                    num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            elif num_written % 5 == 0:
                seat.write(RecordKind.ABORT, fuzzer.abort_all())
                seat.check_served()
                seat.client.poll(0)
        seat.check_served()
        seat.client.close()
        assert greedy(other) == expected
        assert holds_within(lambda: other.get_metrics()["running"] == 0, PATIENCE_S)
        assert len(os.listdir(f"/proc/{pid}/fd")) <= num_descriptors, "descriptors leak"
    print(f"{num_written} records, cut off {num_cut_off} times, {num_checks} checks between")
    assert num_cut_off > num_records // 10


def test_random_records_cut_off_their_writer_only(name: str) -> None:
    fuzz(name, 500)


@pytest.mark.stress
def test_a_hundred_thousand_random_records(name: str) -> None:
    fuzz(name, MANY_RECORDS)


def in_slot(seat: Seat, kind: int, record: bytes) -> None:
    """Write a record that lies in a tensor slot, as a large request does."""
    slot = seat.channel.slots.claim(len(record))
    assert slot is not None
    slot.buffer[:] = record
    seat.write(RecordKind.IN_SLOT, b"".join(codec.encode_in_slot(kind, slot.publish())))  # type: ignore[arg-type]


def test_a_slot_holds_a_message_or_ends_the_connection(name: str) -> None:
    call = b"".join(codec.encode_call(Call(2**50, Method.RESET_PREFIX_CACHE)))
    with LLM.attach(name) as other:
        expected = greedy(other)
        good = Seat(name).enter()
        for _ in range(2 * layout.NUM_SLOTS):
            in_slot(good, RecordKind.CALL, call)
            good.check_served()
        good.client.close()
        for kind, record in [
            (RecordKind.CALL, call[:11]),
            (RecordKind.ADD, call),
            (99, call),
            (0, b"x"),
        ]:
            bad = Seat(name).enter()
            in_slot(bad, kind, record)
            bad.check_cut_off()
            assert greedy(other) == expected


def bucket(seat: Seat, pieces: str) -> None:
    slot = seat.channel.slots.claim(4096)
    assert slot is not None
    record = codec.encode_weights(Weights(slot.publish(), pieces))
    seat.write(RecordKind.WEIGHTS, b"".join(record))


def test_a_bucket_of_weights_is_one_or_ends_the_connection(name: str) -> None:
    piece = ["model.norm.weight", "float32", [256], 0, 256, 0]
    with LLM.attach(name) as other:
        expected = greedy(other)
        good = Seat(name).enter()
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
            bad = Seat(name).enter()
            bad.client.call(Method.START_WEIGHTS)
            bucket(bad, pieces)
            bad.check_cut_off()
            assert greedy(other) == expected
        assert other.get_weight_version() == 0


def damaged_header(*header: int) -> Callable[[Seat], None]:
    """A record of 32 bytes of a good CALL whose header is then replaced before it shows."""

    def damage(seat: Seat) -> None:
        position = seat.word(layout.REQUEST_PUBLISHED_OFFSET).load()
        begin = layout.REQUEST_RING_OFFSET + position % layout.RING_BYTES
        values = [position if value == AT_POSITION else value for value in header]
        RECORD_HEADER.pack_into(seat.memory, begin, *values)
        seat.store(layout.REQUEST_PUBLISHED_OFFSET, position + 32)

    return damage


def moved_cursor(distance: int) -> Callable[[Seat], None]:
    def damage(seat: Seat) -> None:
        position = seat.word(layout.REQUEST_PUBLISHED_OFFSET).load()
        seat.store(layout.REQUEST_PUBLISHED_OFFSET, (position + distance) % 2**64)

    return damage


def lent_twice(seat: Seat) -> None:
    in_a_slot = layout.REQUEST_SLOT_TABLE_OFFSET
    seat.store(in_a_slot + layout.SLOT_PUBLISHED_OFFSET, 2**64 - 1)
    seat.store(in_a_slot + layout.SLOT_PAYLOAD_OFFSET, 2**64 - 1)
    seat.write(RecordKind.IN_SLOT, pack("<IIII", RecordKind.ADD, 0, 0, 16))


def behind_its_slot(seat: Seat) -> None:
    in_a_slot = layout.REQUEST_SLOT_TABLE_OFFSET
    seat.store(in_a_slot + layout.SLOT_PUBLISHED_OFFSET, 1)
    seat.store(in_a_slot + layout.SLOT_PAYLOAD_OFFSET, 2**64 - 1)
    nbytes = layout.SMALL_SLOT_BYTES + 1
    seat.write(RecordKind.IN_SLOT, pack("<IIII", RecordKind.ADD, 0, 0, nbytes))


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
            seat = Seat(name).enter()
            seat.check_served()
            damage(seat)
            assert holds_within(seat.is_cut_off, PATIENCE_S), what
            seat.check_cut_off()
            assert greedy(other) == expected, what


def test_words_of_the_engine_in_that_segment_are_not_believed_by_it(name: str) -> None:
    """What only the engine writes it knows by itself, so damage there is for the front end."""
    with LLM.attach(name) as other:
        expected = greedy(other)
        for offset in (layout.REQUEST_CONSUMED_OFFSET, layout.OUTPUT_PUBLISHED_OFFSET):
            seat = Seat(name).enter()
            seat.store(offset, 2**64 - 1)
            assert greedy(other) == expected
            seat.client.close()
        seat = Seat(name).enter()
        seat.store(layout.CLIENT_PARKED_OFFSET, 2**64 - 1)
        seat.check_served()
        seat.client.close()


@pytest.mark.parametrize("consumed", [2**63, 8, 2**64 - 16])
def test_a_damaged_cursor_of_the_output_ring_cuts_off_its_owner_only(
    name: str, consumed: int
) -> None:
    with LLM.attach(name) as other:
        expected = greedy(other)
        seat = Seat(name).enter()
        seat.store(layout.OUTPUT_CONSUMED_OFFSET, consumed)
        call = b"".join(codec.encode_call(Call(1, Method.RESET_PREFIX_CACHE)))
        deadline = time.monotonic() + PATIENCE_S
        while not seat.is_cut_off() and time.monotonic() < deadline:
            seat.channel.try_send(RecordKind.CALL, call)  # until the output ring looks full
        seat.check_cut_off()
        assert greedy(other) == expected


def test_a_cursor_damaged_while_outputs_wait_cuts_off_its_owner_only(name: str) -> None:
    """The engine meets it outside of that front end's turn, when it looks for room again."""
    with LLM.attach(name) as other:
        expected = greedy(other)
        seat = Seat(name).enter()
        call = b"".join(codec.encode_call(Call(1, Method.RESET_PREFIX_CACHE)))
        published = seat.channel.outputs._published
        deadline = time.monotonic() + PATIENCE_S
        while published.load() < layout.RING_BYTES - 64 and time.monotonic() < deadline:
            seat.channel.try_send(RecordKind.CALL, call)
        assert published.load() >= layout.RING_BYTES - 64
        seat.store(layout.OUTPUT_CONSUMED_OFFSET, 2**63)
        assert holds_within(seat.is_cut_off, PATIENCE_S)
        seat.client.close()
        assert greedy(other) == expected


def test_a_pid_that_cannot_be_is_not_looked_at(name: str) -> None:
    """Whether that front end lives its lock says; the engine must not fall over its pid."""
    seat = Seat(name)
    seat.store(layout.CREATOR_PID_OFFSET, 2**40)
    seat.enter()
    seat.check_served()
    seat.client.close()


def test_a_damaged_state_word_cuts_off_its_owner_only(name: str) -> None:
    with LLM.attach(name) as other:
        expected = greedy(other)
        seat = Seat(name).enter()
        seat.store(layout.CLIENT_STATE_OFFSET, 4711)
        assert holds_within(
            lambda: seat.client._view.accepted(seat.client._place) != seat.client._nonce,
            PATIENCE_S,
        )
        seat.client.close()
        assert greedy(other) == expected


def stored(offset: int, value: int) -> Callable[[Seat], None]:
    return lambda seat: seat.store(offset, value)


@pytest.mark.parametrize(
    "damage",
    [
        stored(layout.VERSION_OFFSET, 99),
        stored(layout.NONCE_OFFSET, 2**62 + 1),
        stored(layout.CLIENT_DOORBELL_OFFSET, 99),
        stored(layout.OUTPUT_CONSUMED_OFFSET, 2**40),
    ],
    ids=["version", "nonce", "doorbell", "consumed"],
)
def test_a_segment_damaged_before_the_knock_is_not_let_in(
    name: str, damage: Callable[[Seat], None]
) -> None:
    with LLM.attach(name) as other:
        expected = greedy(other)
        seat = Seat(name)
        damage(seat)
        with pytest.raises(EngineStartError, match="could not open this front end's segment"):
            seat.enter()
        assert greedy(other) == expected
