"""Withheld posts of the doorbell lose no message and delay none beyond the longest wait.

SHMLLM_WAKEUP_MESSAGES sets how many messages go each way (20,000); SHMLLM_TEST_SEED repeats
a run. This file is also the program of the second process.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.programs import environment_of_test_files
from support.waiting import PATIENCE_S

from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.doorbell import Doorbell
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.wait import WaitPolicy

pytestmark = [pytest.mark.process, pytest.mark.slow]  # it bounds a time: for a quiet machine

NUM_MESSAGES = int(os.environ.get("SHMLLM_WAKEUP_MESSAGES", "20000"))
SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
WITHHELD = 0.01
LONGEST_BURST = 16
ALLOWANCE_S = 0.05
POLICY = WaitPolicy.named("idle")  # parks at once, so that every message needs its post
MESSAGE = struct.Struct("<QQ")  # number, when it was published
SUMMARY = struct.Struct("<QQQQ")  # received, out of order, latest, posts withheld
ECHO, END = 1, 2


class Forgetful:
    """A doorbell that withholds some of its posts."""

    def __init__(self, doorbell: Doorbell, seed: int, share: float = WITHHELD) -> None:
        self._doorbell = doorbell
        self._random = random.Random(seed)
        self._share = share
        self.num_posted = self.num_withheld = 0

    def post(self) -> None:
        if self._random.random() < self._share:
            self.num_withheld += 1
        else:
            self.num_posted += 1
            self._doorbell.post()

    def close(self) -> None:
        self._doorbell.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._doorbell, name)


class Receipts:
    """What one side received: the order of the numbers, and the longest latency."""

    def __init__(self) -> None:
        self.num = self.num_wrong = self.latest_ns = 0

    def take(self, _kind: int, record: memoryview) -> None:
        number, published_ns = MESSAGE.unpack(record)
        self.latest_ns = max(self.latest_ns, time.monotonic_ns() - published_ns)
        self.num_wrong += number != self.num
        self.num += 1


def message(number: int) -> bytes:
    return MESSAGE.pack(number, time.monotonic_ns())


def echo(control_fd: int, client_fd: int, seed: int) -> None:
    """The second process: an engine that answers each message with one of its own."""
    control = Segment.attach(control_fd, SegmentKind.CONTROL)
    control.take_ownership()
    channel = CoreChannel(control, Segment.attach(client_fd, SegmentKind.CLIENT))
    waiter = CoreWaiter(control, POLICY)
    bell = channel._peer_doorbell = Forgetful(channel._peer_doorbell, seed)
    receipts = Receipts()
    is_over = False

    def handle(kind: int, record: memoryview) -> None:
        nonlocal is_over
        if kind == END:
            is_over = True
        else:
            receipts.take(kind, record)
            assert channel.try_send(ECHO, message(receipts.num - 1))

    while not is_over and not channel.is_client_closing:
        waiter.wait(channel.has_requests, busy=True)
        channel.drain(handle)
    summary = SUMMARY.pack(receipts.num, receipts.num_wrong, receipts.latest_ns, bell.num_withheld)
    assert channel.try_send(END, summary)


class Front:
    """The first process: sends bursts and waits for their answers."""

    def __init__(self, channel: ClientChannel, peer: subprocess.Popen[bytes]) -> None:
        self.channel = channel
        self.peer = peer
        self.receipts = Receipts()
        self.summary: tuple[int, ...] | None = None
        self.deadline = time.monotonic() + PATIENCE_S + NUM_MESSAGES / 200

    def handle(self, kind: int, record: memoryview) -> None:
        if kind == END:
            self.summary = SUMMARY.unpack(record)
        else:
            self.receipts.take(kind, record)

    def receive_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.channel.wait()
            self.channel.drain(self.handle)
            assert self.peer.poll() is None or self.summary is not None, "the peer died"
            assert time.monotonic() < self.deadline, f"stuck after {self.receipts.num} answers"

    def run(self, rng: random.Random) -> None:
        sent = 0
        while sent < NUM_MESSAGES:
            end = min(NUM_MESSAGES, sent + rng.randint(1, LONGEST_BURST))
            for number in range(sent, end):
                assert self.channel.try_send(ECHO, message(number))
                if rng.random() < 0.1:
                    time.sleep(0)
            sent = end
            self.receive_until(lambda end=end: self.receipts.num >= end)  # type: ignore[misc]
        while not self.channel.try_send(END):
            time.sleep(0.001)
        self.receive_until(lambda: self.summary is not None)


def test_withheld_posts_lose_no_message_and_delay_none_beyond_the_longest_wait() -> None:
    print(f"seed {SEED}")
    with Segment.create(SegmentKind.CONTROL) as control, Segment.create(SegmentKind.CLIENT) as own:
        own.take_ownership()
        channel = ClientChannel(control, own, POLICY)
        bell = channel._peer_doorbell = Forgetful(channel._peer_doorbell, SEED + 1)
        fds = (control.fd, own.fd)
        peer = subprocess.Popen(
            [sys.executable, __file__, *map(str, fds), str(SEED + 2)],
            pass_fds=fds,
            env=environment_of_test_files(),
        )
        front = Front(channel, peer)
        try:
            # The first message waits for an interpreter to start, which is no wake-up.
            front.receive_until(control.is_owned)
            front.run(random.Random(SEED))
            assert peer.wait(PATIENCE_S) == 0
        finally:
            peer.kill()
            peer.wait(PATIENCE_S)
            channel.close()
    assert front.summary is not None
    num, num_wrong, latest_ns, num_withheld = front.summary
    print(
        f"latest {latest_ns / 1e6:.1f} ms there, {front.receipts.latest_ns / 1e6:.1f} ms back; "
        f"withheld {bell.num_withheld} there, {num_withheld} back"
    )
    assert num == front.receipts.num == NUM_MESSAGES
    assert num_wrong == front.receipts.num_wrong == 0
    assert bell.num_withheld > 0
    assert num_withheld > 0
    latest_s = max(latest_ns, front.receipts.latest_ns) / 1e9
    assert latest_s > POLICY.park_cap_s / 2, "no withheld post mattered, so this showed nothing"
    assert latest_s <= POLICY.park_cap_s + ALLOWANCE_S


if __name__ == "__main__":
    echo(*map(int, sys.argv[1:]))
