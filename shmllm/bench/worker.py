"""The two processes of a variant: the front end, started by exec, and the core, spawned by it.

This module owns the timed loops. The front end receives a command over a connection, passes it to
the core, runs its own part and reports the measurements of both. Each process exits when the
process that started it exits, so that a kill of any of them leaves no process. The module must not
know how results are combined.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from shmllm.bench.cases import CASES
from shmllm.bench.loads import Load, acknowledgement
from shmllm.bench.transports import Transport
from shmllm.bench.variants import VARIANTS

JOIN_S = 5.0


@dataclass(frozen=True)
class Command:
    """A measurement to run.

    Attributes:
        case: the name of the case.
        is_stream: whether to measure one-way throughput instead of round trips.
        messages: number of timed messages; for a stream a multiple of the case's window.
        warm_up: number of messages before the timed ones.
    """

    case: str
    is_stream: bool
    messages: int
    warm_up: int


def exit_with(*sentinels: int) -> threading.Event:
    """Starts a thread that exits this process when any of the descriptors becomes readable.

    Args:
        sentinels: pidfds or sentinels of other processes, readable when those processes end.

    Returns:
        An event; setting it disarms the thread.
    """
    is_disarmed = threading.Event()

    def watch() -> None:
        wait(list(sentinels))
        if not is_disarmed.is_set():
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return is_disarmed


def pin(index: int) -> None:
    """Pins this process to the CPU at `index` (0: first, -1: last) of those that it may use."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})


def received(connection: Connection[Any, Any]) -> Iterator[bytes]:
    """Yields the messages of a connection until the other end closes it."""
    with contextlib.suppress(EOFError):
        while True:
            yield connection.recv_bytes()


def time_round_trips(transport: Transport, load: Load, command: Command) -> tuple[array[int], int]:
    """Times round trips at the sending end.

    Returns:
        The duration of each round trip in nanoseconds, and the CPU time of all in nanoseconds.
    """
    encode, send, receive = load.encode, transport.send, transport.receive
    now, durations = time.perf_counter_ns, [0] * command.messages
    cpu_began = 0
    for number in range(-command.warm_up, command.messages):
        if number == 0:
            cpu_began = time.process_time_ns()
        stamp = abs(number)
        began = now()
        send(encode(stamp))
        answer = receive(bytes)
        ended = now()
        if number >= 0:
            durations[number] = ended - began
        if answer != acknowledgement(stamp):
            raise RuntimeError(f"message {stamp} of {command.case} came back as {answer!r}")
    return array("q", durations), time.process_time_ns() - cpu_began


def answer_round_trips(transport: Transport, load: Load, command: Command) -> int:
    """Runs the receiving end of `time_round_trips`.

    Returns:
        The CPU time of receiving, decoding and acknowledging, in nanoseconds.
    """
    decode, send, receive = load.decode, transport.send, transport.receive
    for _ in range(command.warm_up):
        send((receive(decode),))
    cpu_began = time.process_time_ns()
    for _ in range(command.messages):
        send((receive(decode),))
    return time.process_time_ns() - cpu_began


def time_stream(transport: Transport, load: Load, command: Command) -> tuple[array[int], int]:
    """Times a one-way stream at the sending end.

    The sender sends the next window while the receiver acknowledges the previous one, so at most
    two windows are in flight.

    Returns:
        The duration of the whole stream in nanoseconds as the only item, and the CPU time.
    """
    encode, send, receive = load.encode, transport.send, transport.receive
    window = CASES[command.case].window
    parts = encode(0)
    began, cpu_began = time.perf_counter_ns(), time.process_time_ns()
    for first in range(0, command.messages, window):
        for _ in range(window):
            send(parts)
        if first:
            receive(bytes)
    receive(bytes)
    cpu = time.process_time_ns() - cpu_began
    return array("q", [time.perf_counter_ns() - began]), cpu


def answer_stream(transport: Transport, load: Load, command: Command) -> int:
    """Runs the receiving end of `time_stream`, with one acknowledgement per window.

    Returns:
        The CPU time of receiving, decoding and acknowledging, in nanoseconds.
    """
    decode, send, receive = load.decode, transport.send, transport.receive
    window, result = CASES[command.case].window, b""
    cpu_began = time.process_time_ns()
    for _ in range(0, command.messages, window):
        for _ in range(window):
            result = receive(decode)
        send((result,))
    return time.process_time_ns() - cpu_began


class Endpoint:
    """One end of a variant: runs commands over its end of the transport.

    Args:
        variant: the variant's name.
        transport: this end of the transport.
        is_core: whether this is the core's end.
    """

    def __init__(self, variant: str, transport: Transport, is_core: bool) -> None:
        self._variant = VARIANTS[variant]
        self._transport = transport
        self._is_core = is_core
        self._loads: dict[str, Load] = {}

    def run(self, command: Command) -> tuple[array[int], int]:
        """Runs a command.

        Returns:
            Durations in nanoseconds (empty on the receiving end), and CPU time in nanoseconds.
        """
        case = CASES[command.case]
        if command.case not in self._loads:
            # One load at a time: several sources of 16 MiB would evict each other from the cache.
            self._loads = {command.case: self._variant.load(case)}
        load = self._loads[command.case]
        gc.collect()
        gc.freeze()
        if case.is_sent_by_core == self._is_core:
            time_it = time_stream if command.is_stream else time_round_trips
            return time_it(self._transport, load, command)
        answer = answer_stream if command.is_stream else answer_round_trips
        return array("q"), answer(self._transport, load, command)


def run_core(
    variant: str, commands: Connection[Any, Any], handles: tuple[Any, ...], cpus: set[int] | None
) -> None:
    """Runs the core's process: attaches to the transport and runs commands until they end."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
        pin(-1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    exit_with(parent.sentinel)
    transport = VARIANTS[variant].attach(handles)
    endpoint = Endpoint(variant, transport, is_core=True)
    commands.send_bytes(b"")
    for text in received(commands):
        durations, cpu = endpoint.run(Command(**json.loads(text)))
        commands.send_bytes(cpu.to_bytes(8, "little") + durations.tobytes())
    transport.close()


def run_front(
    variant: str,
    directory: str,
    commands: Connection[Any, Any],
    parent_pidfd: int,
    is_pinned: bool,
) -> None:
    """Runs the front end's process: starts the core and runs commands until they end."""
    cpus = os.sched_getaffinity(0) if is_pinned else None
    if is_pinned:
        pin(0)
    context = multiprocessing.get_context("spawn")
    transport, handles = VARIANTS[variant].open(directory)
    ours, theirs = context.Pipe()
    core = context.Process(target=run_core, args=(variant, theirs, handles, cpus), daemon=True)
    core.start()
    theirs.close()
    is_disarmed = exit_with(parent_pidfd, core.sentinel)
    ours.recv_bytes()
    transport.handshake()
    endpoint = Endpoint(variant, transport, is_core=False)
    commands.send_bytes(b"")
    for text in received(commands):
        ours.send_bytes(text)
        durations, cpu = endpoint.run(Command(**json.loads(text)))
        report = ours.recv_bytes()
        cpu += int.from_bytes(report[:8], "little")
        commands.send_bytes(cpu.to_bytes(8, "little") + (durations.tobytes() or report[8:]))
    # The core ends first, because this process owns the resources that both use.
    is_disarmed.set()
    ours.close()
    core.join(JOIN_S)
    transport.close()


if __name__ == "__main__":
    _, name, folder, *numbers = sys.argv
    command_fd, pidfd, is_pinned = map(int, numbers)
    run_front(name, folder, Connection(command_fd), pidfd, bool(is_pinned))
