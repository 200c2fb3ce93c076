"""Two real processes over shared memory. This file is also the program of the second one."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.programs import environment_of_test_files, kill, read_line
from support.waiting import PATIENCE_S, wait_until

from shmllm.errors import SegmentError
from shmllm.ipc import layout
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.control import ControlPage, ControlView
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotRef
from shmllm.ipc.states import EngineState, SegmentKind
from shmllm.ipc.stats import Stat
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word

pytestmark = pytest.mark.process

POLICY = WaitPolicy.for_machine("balanced", len(os.sched_getaffinity(0)), 1)
NUM_RECORDS = 20_000
SEQUENCE = struct.Struct("<QI")
ECHO, TENSOR = 1, 2


class Peer:
    """The program of the second process: an engine that echoes what it is sent."""

    def __init__(self, control: Segment, client: Segment) -> None:
        control.take_ownership()
        self.page = ControlPage(control)
        self.channel = CoreChannel(control, client)
        self.waiter = CoreWaiter(control, POLICY)
        self.backlog: deque[tuple[int, bytes]] = deque()

    def run(self) -> None:
        self.page.set_state(EngineState.READY)
        orphaned_at = time.monotonic() + 2 * PATIENCE_S
        while not self.channel.is_client_closing:
            self.waiter.wait(self.is_ready, busy=True)
            self.channel.drain(self.handle)
            while self.backlog and self.channel.try_send(*self.backlog[0]):
                self.backlog.popleft()
            self.page.beat()
            assert time.monotonic() < orphaned_at, "nobody told this process to end"
        self.page.set_last_words("told to")
        self.page.set_state(EngineState.DEAD)

    def is_ready(self) -> bool:
        return bool(self.backlog) or self.channel.has_requests() or self.channel.is_client_closing

    def handle(self, kind: int, view: memoryview) -> None:
        answer = bytes(view)
        if kind == TENSOR:
            ref = SlotRef(*struct.unpack("<QQQ", view))
            with self.channel.slots.view(ref) as payload:
                array = np.frombuffer(payload, dtype=np.float32)
                answer = struct.pack("<d", float(array.sum(dtype=np.float64)))
                del array
            self.channel.slots.release(ref)
        self.backlog.append((kind, answer))


def main(arguments: list[str]) -> None:
    mode, *numbers = arguments
    fds = [int(number) for number in numbers]
    if mode == "echo":
        control = Segment.attach(fds[0], SegmentKind.CONTROL)
        Peer(control, Segment.attach(fds[1], SegmentKind.CLIENT)).run()
    elif mode == "own":
        Segment.attach(fds[0], SegmentKind.CONTROL).take_ownership()
        print("owned", flush=True)
        signal.sigwait({signal.SIGTERM})
    elif mode == "fork":
        fork_and_report()


def fork_and_report() -> None:
    """The parent owns segments that a forked child tries to use and to close."""
    with Segment.create(SegmentKind.CONTROL) as control, Segment.create(SegmentKind.CLIENT) as own:
        own.take_ownership()
        channel = ClientChannel(control, own, POLICY)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            lines = [outcome(use) for use in child_uses(channel, own)]
            channel.close()
            own.close()
            os.write(writing, "\n".join(lines).encode())
            signal.sigwait({signal.SIGTERM})
            os._exit(0)
        report = os.read(reading, 65536).decode()
        with Segment.attach(os.dup(own.fd), SegmentKind.CLIENT) as observer:
            print(report)
            print("parent sends:", channel.try_send(1, b"still works"))
            print("owned while the child lives:", observer.is_owned())
            channel.close()
            own.close()
            print("owned after the parent closed:", observer.is_owned(), flush=True)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def child_uses(channel: ClientChannel, segment: Segment) -> list[Callable[[], object]]:
    return [
        lambda: channel.try_send(1, b"x"),
        lambda: channel.drain(lambda kind, view: None),
        channel.wait,
        lambda: segment.buffer,
        segment.take_ownership,
    ]


def outcome(use: Callable[[], object]) -> str:
    try:
        return f"returned {use()!r}"
    except SegmentError as error:
        return f"SegmentError: {error}"


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts this file as a program; whatever happens, its process is gone afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(mode: str, *segments: Segment) -> subprocess.Popen[str]:
        fds = [segment.fd for segment in segments]
        process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), mode, *map(str, fds)],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_of_test_files(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        kill(process)


@pytest.fixture
def segments() -> Iterator[tuple[Segment, Segment]]:
    with (
        Segment.create(SegmentKind.CONTROL) as control,
        Segment.create(SegmentKind.CLIENT) as client,
    ):
        client.take_ownership()
        yield control, client


@pytest.fixture
def front(segments: tuple[Segment, Segment], start: Start) -> Iterator[ClientChannel]:
    """A front end's channel whose engine is running."""
    channel = ClientChannel(*segments, POLICY)
    start("echo", *segments)
    wait_until(lambda: channel.engine_state is EngineState.READY, "engine")
    yield channel
    channel.set_closing()
    channel.close()


def wait_for_answers(channel: ClientChannel, answers: list[bytes], number: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(answers) < number:
        channel.wait(deadline)
        channel.drain(lambda kind, view: answers.append(bytes(view)))
        assert time.monotonic() < deadline, f"{len(answers)} of {number} answers"


def test_every_record_crosses_in_order_and_undamaged(front: ClientChannel) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    next_answer = 0

    def check(kind: int, view: memoryview) -> None:
        nonlocal next_answer
        sequence, checksum = SEQUENCE.unpack_from(view)
        assert sequence == next_answer
        assert checksum == zlib.crc32(view[SEQUENCE.size :])
        next_answer += 1

    deadline = time.monotonic() + PATIENCE_S
    for number in range(NUM_RECORDS):
        payload = source.randbytes(source.choice((0, 1, 15, 16, 17, 64, 300, 2000)))
        header = SEQUENCE.pack(number, zlib.crc32(payload))
        front.send(ECHO, header, payload, on_full=lambda: front.drain(check), deadline=deadline)
    while next_answer < NUM_RECORDS and time.monotonic() < deadline:
        front.wait(deadline)
        front.drain(check)
    assert next_answer == NUM_RECORDS
    front.requests.check_integrity()
    front.outputs.check_integrity()
    assert front.requests.statistics().num_messages == NUM_RECORDS


def test_arrays_cross_through_slots_without_running_out(front: ClientChannel) -> None:
    answers: list[bytes] = []
    sums = []
    for number in range(3 * layout.NUM_SLOTS):
        array = np.full(1000 + number, number, dtype=np.float32)
        sums.append(float(array.sum()))
        slot = front.slots.claim(array.nbytes)
        while slot is None:
            wait_for_answers(front, answers, len(answers) + 1)
            slot = front.slots.claim(array.nbytes)
        np.copyto(np.frombuffer(slot.buffer, dtype=np.float32), array)
        assert front.try_send(TENSOR, struct.pack("<QQQ", *slot.publish()))
    wait_for_answers(front, answers, len(sums))
    assert [struct.unpack("<d", answer)[0] for answer in answers] == sums
    assert front.slots.num_free == layout.NUM_SLOTS


def test_a_record_without_a_post_is_found_at_the_longest_wait(
    front: ClientChannel, segments: tuple[Segment, Segment]
) -> None:
    parked = Word(segments[0].buffer, layout.CONTROL_PARKED_OFFSET)
    answers: list[bytes] = []
    for number in range(1, 4):
        wait_until(lambda: parked.load() == 1, "parked engine")
        assert front.requests.try_write(ECHO, b"nobody rings")
        wait_for_answers(front, answers, number)
    assert answers == [b"nobody rings"] * 3


def test_the_engine_says_how_it_ended(segments: tuple[Segment, Segment], start: Start) -> None:
    front, view = ClientChannel(*segments, POLICY), ControlView(segments[0])
    process = start("echo", *segments)
    wait_until(lambda: front.engine_state is EngineState.READY, "engine")
    assert view.engine_pid == process.pid
    wait_until(lambda: view.heartbeat_ns > 0, "heartbeat")
    view.close()
    front.set_closing()
    assert process.wait(PATIENCE_S) == 0
    assert front.engine_state is EngineState.DEAD
    assert front.last_words() == "told to"
    assert front.stat(Stat.STEPS) == 0
    front.close()


@pytest.fixture
def owner(start: Start, segments: tuple[Segment, Segment]) -> subprocess.Popen[str]:
    process = start("own", segments[0])
    assert read_line(process) == "owned\n"
    return process


def test_a_killed_owner_owns_nothing_even_before_it_is_reaped(
    owner: subprocess.Popen[str], segments: tuple[Segment, Segment]
) -> None:
    control = segments[0]
    assert control.is_owned()
    with pytest.raises(SegmentError, match="another process owns"):
        control.take_ownership()
    owner.kill()
    wait_until(lambda: not control.is_owned(), "freed ownership")
    control.take_ownership()
    assert control.is_owned()


def test_a_stopped_owner_still_owns(
    owner: subprocess.Popen[str], segments: tuple[Segment, Segment]
) -> None:
    owner.send_signal(signal.SIGSTOP)
    stopped = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
    wait_until(lambda: os.waitid(os.P_PID, owner.pid, stopped) is not None, "stopped owner")
    assert segments[0].is_owned()


def test_a_forked_child_can_neither_use_nor_break_what_its_parent_has(start: Start) -> None:
    report, _ = start("fork").communicate(timeout=PATIENCE_S)
    *uses, sends, owned, freed = report.splitlines()
    assert len(uses) == 5
    for line in uses:
        assert line.startswith("SegmentError: this CLIENT segment belongs to process")
        assert "create one of its own after the fork" in line
    assert sends == "parent sends: True"
    assert owned == "owned while the child lives: True"
    assert freed == "owned after the parent closed: False"


if __name__ == "__main__":
    main(sys.argv[1:])
