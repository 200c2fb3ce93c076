"""Ten million messages through one channel while both of its ends are stopped at random.

    pytest -m stress tests/stress/test_ring_stress.py -s
    SHMLLM_STRESS_MESSAGES=100000000 SHMLLM_STRESS_SEED=7 pytest -m stress ... -s

Half of the messages go each way at the same time. Every one carries its number in line, its
length, and the CRC of its body, and its reader checks all three: nothing may be lost, torn,
sent twice or out of order. Most bodies are short; a few are as large as the ring takes. The
process of the test sends SIGSTOP and SIGCONT to both ends, and prints the seed. This file is
also the program of the two ends.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from struct import Struct

import pytest
from support.programs import environment_of_test_files, kill, read_line
from support.waiting import PATIENCE_S

from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.layout import RECORD_HEADER_BYTES, RING_BYTES
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.wait import WaitPolicy

NUM_MESSAGES = int(os.environ.get("SHMLLM_STRESS_MESSAGES", 10**7))
SEED = os.environ.get("SHMLLM_STRESS_SEED")
MIN_RATE = 20_000  # messages a second, below which the run counts as hung
START_S = 30.0

HEADER = Struct("<QII")  # number in line, bytes of the body, its CRC
LARGEST = RING_BYTES // 2 - RECORD_HEADER_BYTES - HEADER.size
NUM_BODIES = 4096
NUM_LARGE = 48
PATTERN = 65_537  # odd, so that the pattern meets the ring's laps at ever other places
LARGE_EVERY, LULL_EVERY = 2_000, 3_000
NUM_KINDS = 251
BURST = 128


class Script:
    """The messages of one direction, which both ends can compute: body and kind by number."""

    def __init__(self, seed: str) -> None:
        source = random.Random(seed)
        short = [0, 1, 15, 16, 17, *(source.randrange(400) for _ in range(NUM_BODIES))]
        large = [LARGEST, LARGEST - 1, *(source.randrange(LARGEST) for _ in range(NUM_LARGE))]
        bodies = [source.randbytes(length) for length in short + large]
        self.bodies = [(len(body), zlib.crc32(body), body) for body in bodies]
        self.pattern = source.choices(range(len(short)), k=PATTERN)
        for place in source.sample(range(PATTERN), PATTERN // LARGE_EVERY):
            self.pattern[place] = source.randrange(len(short), len(bodies))
        self.lulls = set(source.sample(range(PATTERN), PATTERN // LULL_EVERY))


class Sender:
    """Sends the messages of a script in order until the ring is full."""

    def __init__(self, script: Script, number: int, try_send: Callable[..., bool]) -> None:
        self._script = script
        self._try_send = try_send
        self._end = number
        self.next = 0
        self.is_in_lull = False

    @property
    def is_done(self) -> bool:
        return self.next == self._end

    def burst(self) -> int:
        """Send messages; return how many. A lull or a full ring ends it early."""
        script, try_send, pack = self._script, self._try_send, HEADER.pack
        begin = number = self.next
        end = min(begin + BURST, self._end)
        self.is_in_lull = False
        while number < end:
            place = number % PATTERN
            length, crc, body = script.bodies[script.pattern[place]]
            if not try_send(number % NUM_KINDS, pack(number, length, crc), body):
                break
            number += 1
            if place in script.lulls:
                self.is_in_lull = True
                break
        self.next = number
        return number - begin


class Checker:
    """Receives the messages of a script and raises at the first that is not the next one."""

    def __init__(self, script: Script, number: int) -> None:
        self._script = script
        self._end = number
        self.next = 0

    @property
    def is_done(self) -> bool:
        return self.next == self._end

    def check(self, kind: int, view: memoryview) -> None:
        number, length, crc = HEADER.unpack_from(view)
        expected = self.next
        if number != expected:
            raise AssertionError(f"message {number} came where {expected} is in line")
        script = self._script
        body = view[HEADER.size :]
        if (
            kind != number % NUM_KINDS
            or len(body) != length
            or (length, crc) != script.bodies[script.pattern[number % PATTERN]][:2]
            or zlib.crc32(body) != crc
        ):
            raise AssertionError(f"message {number} is torn: kind {kind}, {len(body)} bytes")
        self.next = expected + 1


def run_end(role: str, control: Segment, client: Segment, number: int, seed: str) -> dict[str, int]:
    """One end of the channel, from its first message to the last of both directions."""
    scripts = [Script(f"{seed}-there"), Script(f"{seed}-back")]
    policy = WaitPolicy.for_machine("balanced", 1, len(os.sched_getaffinity(0)))
    num_waits = 0
    if role == "front":
        client.take_ownership()
        front = ClientChannel(control, client, policy)
        channel: ClientChannel | CoreChannel = front
        ends = (front.requests, front.outputs)
        wait = front.wait
    else:
        control.take_ownership()
        scripts.reverse()
        core = CoreChannel(control, client)
        channel = core
        ends = (core.outputs, core.requests)
        waiter = CoreWaiter(control, policy)

        def wait() -> bool:
            return waiter.wait(core.has_requests, busy=True)

    sender = Sender(scripts[0], number, channel.try_send)
    checker = Checker(scripts[1], number)
    print("ready", flush=True)
    sys.stdin.readline()
    while not (sender.is_done and checker.is_done):
        num_sent = sender.burst()
        num_taken = channel.drain(checker.check, BURST)
        if num_sent == BURST or num_taken:
            continue
        if sender.is_done or sender.is_in_lull:
            num_waits += 1
            wait()
        elif not num_sent:
            time.sleep(0.0002)  # the ring is full, and nobody rings when it no longer is
    for end in ends:
        end.check_integrity()
    return {
        "sent": ends[0].statistics().num_messages,
        "taken": ends[1].statistics().num_messages,
        "times_full": ends[0].statistics().times_full,
        "waits": num_waits,
    }


def main() -> None:
    """The program of one end."""
    role, control_fd, client_fd, number, seed = sys.argv[1:]
    control = Segment.attach(int(control_fd), SegmentKind.CONTROL)
    client = Segment.attach(int(client_fd), SegmentKind.CLIENT)
    print(json.dumps(run_end(role, control, client, int(number), seed)), flush=True)
    sys.stdin.readline()  # an end that is gone would look dead to the other


def start_end(role: str, segments: tuple[Segment, Segment], *words: str) -> subprocess.Popen[str]:
    fds = tuple(segment.fd for segment in segments)
    return subprocess.Popen(
        [sys.executable, __file__, role, *map(str, fds), *words],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of_test_files(),
    )


def stop_and_go(
    ends: list[subprocess.Popen[str]], source: random.Random, deadline: float
) -> list[int]:
    """Stop the ends at random times until both reported or one failed; return how often."""
    num_stops = [0, 0]
    while time.monotonic() < deadline:
        if any(end.poll() is not None for end in ends) or all(map(has_spoken, ends)):
            break
        which = num_stops.index(0) if 0 in num_stops else source.randrange(2)
        num_stops[which] += 1
        ends[which].send_signal(signal.SIGSTOP)
        time.sleep(source.choice((0, 0.0005, 0.002, 0.005)))
        ends[which].send_signal(signal.SIGCONT)
        time.sleep(source.uniform(0, 0.03))
    return num_stops


def run_stress(number: int) -> None:
    """`number` messages there and as many back; raises if any is not as it was sent."""
    seed = SEED or str(random.randrange(2**32))
    print(f"\nseed {seed}, {2 * number} messages", flush=True)
    with Segment.create(SegmentKind.CONTROL) as control, Segment.create(SegmentKind.CLIENT) as c:
        words = (str(number), seed)
        ends = [start_end(role, (control, c), *words) for role in ("front", "core")]
        try:
            for end in ends:
                assert read_line(end) == "ready\n", end.communicate(timeout=PATIENCE_S)[1]
            began = time.monotonic()
            for end in ends:
                say_go(end)
            stops = stop_and_go(ends, random.Random(seed), began + 60 + 2 * number / MIN_RATE)
            took_s = time.monotonic() - began
            assert all(map(has_spoken, ends)), report(ends, took_s)
            results = []
            for end in ends:
                results.append(json.loads(read_line(end)))
            for end in ends:
                say_go(end)
            assert [end.wait(PATIENCE_S) for end in ends] == [0, 0]
        finally:
            for end in ends:
                kill(end)  # of a stopped process too
    print(f"{2 * number / took_s:,.0f} messages/s, {took_s:.1f} s, stops {stops}, {results}")
    for result in results:
        assert (result["sent"], result["taken"]) == (number, number)
    assert all(num_stops > 0 for num_stops in stops), "neither end may have gone undisturbed"


def say_go(end: subprocess.Popen[str]) -> None:
    assert end.stdin is not None
    end.stdin.write("go\n")
    end.stdin.flush()


def has_spoken(end: subprocess.Popen[str]) -> bool:
    """Whether an end has written to its stdout."""
    assert end.stdout is not None
    return bool(select.select([end.stdout], [], [], 0)[0])


def report(ends: list[subprocess.Popen[str]], took_s: float) -> str:
    """The errors that the ends report."""
    lines = [f"not done after {took_s:.0f} s"]
    for end in ends:
        was_running = end.poll() is None
        end.kill()
        errors = end.communicate(timeout=PATIENCE_S)[1].strip()
        lines.append("still running" if was_running else f"exit {end.returncode}: {errors}")
    return "\n".join(lines)


@pytest.mark.process
def test_no_message_is_lost_torn_repeated_or_out_of_order() -> None:
    run_stress(10_000)


@pytest.mark.stress
def test_nothing_is_lost_in_a_long_run() -> None:
    run_stress(NUM_MESSAGES // 2)


if __name__ == "__main__":
    main()
