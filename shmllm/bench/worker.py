"""One arm's two processes: the front end, started by exec, and the core, spawned by it.

Owns the timed loops. The front end is told over a connection what to run, tells the core,
runs its own part and reports both. Each process ends with the one that started it, so that
nothing is left whoever is killed. Must not know how results are put together.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from array import array
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
    """What to run.

    Attributes:
        case: its name.
        is_stream: one-way throughput instead of round trips.
        messages: how many are timed; a multiple of the case's window for a stream.
        warm_up: messages before those.
    """

    case: str
    is_stream: bool
    messages: int
    warm_up: int


def end_with(*sentinels: int) -> threading.Event:
    """End this process as soon as any of the descriptors says that another one ended.

    Returns:
        Set it, and nothing of the kind happens any more.
    """
    is_over = threading.Event()

    def watch() -> None:
        wait(list(sentinels))
        if not is_over.is_set():
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return is_over


def pin(place: int) -> None:
    """Stay on the first (0) or the last (-1) of the CPUs that this process may use."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place]})


def time_round_trips(transport: Transport, load: Load, command: Command) -> tuple[array[int], int]:
    """(nanoseconds of each round trip, CPU nanoseconds of all)."""
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
    """CPU nanoseconds that receiving, decoding and acknowledging took."""
    decode, send, receive = load.decode, transport.send, transport.receive
    for _ in range(command.warm_up):
        send((receive(decode),))
    cpu_began = time.process_time_ns()
    for _ in range(command.messages):
        send((receive(decode),))
    return time.process_time_ns() - cpu_began


def time_stream(transport: Transport, load: Load, command: Command) -> tuple[array[int], int]:
    """As `time_round_trips`, with the time of the whole stream as the only duration.

    Two windows are on their way at most: while one is acknowledged the next one is sent.
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
    """As `answer_round_trips`, with one acknowledgement for each window."""
    decode, send, receive = load.decode, transport.send, transport.receive
    window, result = CASES[command.case].window, b""
    cpu_began = time.process_time_ns()
    for _ in range(0, command.messages, window):
        for _ in range(window):
            result = receive(decode)
        send((result,))
    return time.process_time_ns() - cpu_began


class End:
    """One process's part in an arm.

    Args:
        arm: its name.
        link: its end of the link.
        is_core: which end it is.
    """

    def __init__(self, variant: str, transport: Transport, is_core: bool) -> None:
        self._variant = VARIANTS[variant]
        self._link = transport
        self._is_core = is_core
        self._loads: dict[str, Load] = {}

    def run(self, command: Command) -> tuple[array[int], int]:
        """(durations, empty on the receiving end; CPU nanoseconds)."""
        case = CASES[command.case]
        if command.case not in self._loads:
            # Kept one at a time: 16 MiB sources would push each other out of the cache.
            self._loads = {command.case: self._variant.load(case)}
        load = self._loads[command.case]
        gc.collect()
        gc.freeze()
        if case.is_sent_by_core == self._is_core:
            time_it = time_stream if command.is_stream else time_round_trips
            return time_it(self._link, load, command)
        answer = answer_stream if command.is_stream else answer_round_trips
        return array("q"), answer(self._link, load, command)


def run_core(
    variant: str, commands: Connection[Any, Any], handles: tuple[Any, ...], cpus: set[int] | None
) -> None:
    """The core's process: attach, then answer commands until there are no more."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
        pin(-1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with(parent.sentinel)
    transport = VARIANTS[variant].attach(handles)
    end = End(variant, transport, is_core=True)
    commands.send_bytes(b"")
    while True:
        try:
            text = commands.recv_bytes()
        except EOFError:
            break
        durations, cpu = end.run(Command(**json.loads(text)))
        commands.send_bytes(cpu.to_bytes(8, "little") + durations.tobytes())
    transport.close()


def run_front(
    variant: str,
    directory: str,
    commands: Connection[Any, Any],
    parent_pidfd: int,
    is_pinned: bool,
) -> None:
    """The front end's process."""
    cpus = os.sched_getaffinity(0) if is_pinned else None
    if is_pinned:
        pin(0)
    context = multiprocessing.get_context("spawn")
    transport, handles = VARIANTS[variant].open(directory)
    ours, theirs = context.Pipe()
    core = context.Process(target=run_core, args=(variant, theirs, handles, cpus), daemon=True)
    core.start()
    theirs.close()
    is_over = end_with(parent_pidfd, core.sentinel)
    ours.recv_bytes()
    transport.greet()
    end = End(variant, transport, is_core=False)
    commands.send_bytes(b"")
    while True:
        try:
            text = commands.recv_bytes()
        except EOFError:
            break
        ours.send_bytes(text)
        durations, cpu = end.run(Command(**json.loads(text)))
        report = ours.recv_bytes()
        cpu += int.from_bytes(report[:8], "little")
        commands.send_bytes(cpu.to_bytes(8, "little") + (durations.tobytes() or report[8:]))
    # The core ends first: this end made what both use, so it takes it away last.
    is_over.set()
    ours.close()
    core.join(JOIN_S)
    transport.close()


if __name__ == "__main__":
    _, name, folder, *numbers = sys.argv
    command_fd, pidfd, is_pinned = map(int, numbers)
    run_front(name, folder, Connection(command_fd), pidfd, bool(is_pinned))
