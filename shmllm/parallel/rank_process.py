"""Starts the processes of ranks, and exchanges commands with them.

A rank gets its commands through a pipe, which only they use: a step needs none. A pipe also ends
with its process, so no wait outlives one.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Pipe, wait
from typing import Any

from shmllm.config import processes
from shmllm.config.engine import EngineConfig
from shmllm.errors import RankDeadError
from shmllm.ipc.liveness import is_stopped, wait_for_end
from shmllm.parallel.memory import GroupMemory, Place
from shmllm.parallel.replies import unpack
from shmllm.parallel.staging import StagingWriter

RANK_MODULE = "shmllm.parallel"
DEATH_GRACE_S = 1.0
"""How long the traceback of a rank that has ended may take to arrive."""


def device_of(first: str, rank: int) -> str:
    """Return the device of a rank, by that of rank 0."""
    name, _, index = first.partition(":")
    return f"cuda:{int(index or 0) + rank}" if name == "cuda" else first


class RankProcess:
    """A rank that runs in a process of its own.

    Args:
        rank: its number.
        memory: the memory of the group.
        staging: the memory for new weights.
        config: the configuration of the engine.
    """

    def __init__(
        self, rank: int, memory: GroupMemory, staging: StagingWriter, config: EngineConfig
    ) -> None:
        self.rank = rank
        self._memory = memory
        from_engine, self._commands = Pipe(duplex=False)
        self._replies, to_engine = Pipe(duplex=False)
        self._num_owed = 1  # results that are to come: the first says that the rank has loaded
        with from_engine, to_engine, _pidfd_of_this_process() as pidfd:
            fds = memory.fd, staging.fd, from_engine.fileno(), to_engine.fileno(), pidfd
            command = [sys.executable, "-m", RANK_MODULE, *map(str, (rank, memory.size, *fds))]
            self._process = processes.start(command, pass_fds=fds)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        own = replace(config, device=device_of(config.device, rank))
        try:
            self._send_bytes(own.to_json().encode())
        except BaseException:
            self.end(time.monotonic())
            raise

    def send(self, name: str, arguments: tuple[Any, ...], places: dict[str, Place]) -> None:
        """Send a command: the rank runs the method of that name of its `RankServer`.

        Args:
            name: the name of the method.
            arguments: its arguments.
            places: where the arrays lie that were made since the last command.

        Raises:
            RankDeadError: the process has ended.
        """
        self._send_bytes(pickle.dumps((name, arguments, places)))
        self._num_owed += 1

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._commands.send_bytes(data)
        except OSError as problem:
            raise RankDeadError(self.describe_end()) from problem

    def receive(self) -> Any:
        """Wait for the result of the last command, and return it.

        Raises:
            RankDeadError: the process has ended.
            Exception: what the method raised; see `Failure.error_of`.
        """
        while self._num_owed > 1:
            self._receive_bytes()  # an interrupt has ended the wait for an earlier result
        value, failure = unpack(self._receive_bytes())
        if failure is not None:
            raise failure.error_of(self.rank)
        return value

    def _receive_bytes(self) -> bytes:
        while not self._replies.poll(0):
            ready = wait([self._replies, self.pidfd])
            if self._replies not in ready and not self._replies.poll(0):
                raise RankDeadError(self.describe_end())
        try:
            received = self._replies.recv_bytes()
            self._num_owed -= 1
        except (EOFError, OSError) as problem:
            raise RankDeadError(self.describe_end()) from problem
        except BaseException:
            self._memory.end()  # an interrupt may have left a piece of the result in the pipe
            raise
        return received

    def describe_end(self) -> str:
        """Return how the process ended, in words, and the traceback that it left, if any."""
        text = self._how_it_ended()
        try:
            if self._replies.poll(0):
                _, failure = unpack(self._replies.recv_bytes())
                return text if failure is None else f"{text}:\n{failure.trace}"
        except (EOFError, OSError):
            pass  # it left none
        return text

    def _how_it_ended(self) -> str:
        name = f"rank {self.rank} (pid {self.pid})"
        if not wait_for_end(self.pidfd, DEATH_GRACE_S):
            return f"{name} has closed its pipe"
        try:
            code = self._process.wait(timeout=DEATH_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"{name} has ended"
        if code < 0:
            return f"{name} was ended by {signal.Signals(-code).name}"
        return f"{name} ended with exit code {code}"

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return wait_for_end(self.pidfd, 0)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        return is_stopped(self.pid)

    def stop(self) -> None:
        """Close the pipe of commands, which ends the process."""
        self._commands.close()

    def end(self, deadline_s: float) -> None:
        """Stop the process, and wait for its end; kill it if that lasts. Idempotent.

        Args:
            deadline_s: when it is killed, as `time.monotonic` counts.
        """
        if self.pidfd < 0:
            return
        self.stop()
        if not wait_for_end(self.pidfd, deadline_s - time.monotonic()):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self._process.wait()
        self._replies.close()
        os.close(self.pidfd)
        self.pidfd = -1


@contextmanager
def _pidfd_of_this_process() -> Iterator[int]:
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)
