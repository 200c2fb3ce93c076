"""Rank 0's end of a group: it starts the other ranks, tells them what to do, and sees them end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

from torch import Tensor

from shmllm.config.engine import EngineConfig
from shmllm.parallel.adapters import GroupAdapters
from shmllm.parallel.cores import threads_of_a_rank
from shmllm.parallel.memory import GroupMemory
from shmllm.parallel.owners import GroupOwners
from shmllm.parallel.rank_process import RankProcess
from shmllm.parallel.staging import StagingWriter
from shmllm.worker.adapters import AdapterMaker
from shmllm.worker.group import Kind
from shmllm.worker.memory_owners import MemoryOwners, OwnedMemory

T = TypeVar("T")
LOOK_S = 0.25
"""How often a stopped rank is looked for."""
STOP_GRACE_S = 2.0
"""How long the ranks may take together to end."""


class RankProcesses:
    """See `worker.ranks.Ranks`.

    Args:
        config: the configuration of the engine, whose device is that of rank 0.
        memory: the memory of the group, which this object closes; None: that of ranks on CPUs.

    Raises:
        EngineStartError: CPUs have fewer threads than ranks.
    """

    def __init__(self, config: EngineConfig, memory: GroupMemory | None = None) -> None:
        parallel = config.parallel
        size = parallel.num_processes
        self.num_threads = 1
        if not config.device.startswith("cuda"):
            self.num_threads = threads_of_a_rank(config.num_threads, parallel)
        is_pipeline = parallel.pipeline_parallel_size > 1
        self.memory = memory or GroupMemory.create(size, is_pipeline)
        self.memory.describe_end = self._describe_end
        self._staging = StagingWriter(self.memory.settle)
        self._others: list[RankProcess] = []
        self._is_closing = self._is_calling = self._have_loaded = False
        self._report: Callable[[int], None] | None = None
        self._closing, self._close = Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="shmllm-ranks", daemon=True)
        try:
            for rank in range(1, size):
                self._others.append(RankProcess(rank, self.memory, self._staging, config))
            self._watcher.start()
        except BaseException:
            self.close()
            raise

    def everywhere(self, own: Callable[[], T], name: str, *arguments: Any) -> list[T]:
        problem: BaseException | None = None
        results: list[T] = []
        with self.memory.turn:
            if self._is_calling:
                raise RuntimeError(
                    "a function that runs in all ranks cannot call what itself runs in all ranks: "
                    "call that by itself"
                )
            if not self._have_loaded:
                self._receive()  # they have loaded their weights
                self._have_loaded = True
            self.memory.settle()
            try:
                self.memory.begin(Kind.COMMAND)
                places = self.memory.new_places()
                for other in self._others:
                    other.send(name, arguments, places)
            except BaseException:
                self.memory.end()  # a rank that got no command would wait for it
                raise
            self._is_calling = True
            try:
                results.append(own())
            except BaseException as raised:
                problem = raised
            finally:
                self._is_calling = False
            try:
                results += self._receive()
            except Exception as raised:
                problem = problem or raised
        if problem is not None:
            raise problem
        return results

    def elsewhere(self, name: str, *arguments: Any) -> list[Any]:
        return self.everywhere(lambda: None, name, *arguments)[1:]

    def together(self, own: Callable[[], T], name: str, *arguments: Any) -> list[T]:
        def run() -> T:
            try:
                return own()
            except BaseException:
                self.memory.end()
                raise

        return self.everywhere(run, name, *arguments)

    def call(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        return self.everywhere(own, "call", pickled())

    def watch(self, report: Callable[[int], None]) -> None:
        self._report = report

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with closing(self._staging.batches(tensors)) as batches:
            for batch in batches:
                self.elsewhere("write", batch)

    def owners(self, own: MemoryOwners) -> OwnedMemory:
        return GroupOwners(own, self.everywhere)

    def adapters(self, own: AdapterMaker) -> GroupAdapters:
        return GroupAdapters(own, self.elsewhere, self._staging)

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self.memory.end()
        self._close.close()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._closing.close()
        deadline_s = time.monotonic() + STOP_GRACE_S
        for other in self._others:
            other.stop()
        for other in self._others:
            other.end(deadline_s)
        self._staging.close()
        self.memory.close()

    def _receive(self) -> list[Any]:
        """Return the others' results. All are read, also if one raises."""
        results, problem = [], None
        for other in self._others:
            try:
                results.append(other.receive())
            except Exception as raised:
                problem = problem or raised
        if problem is not None:
            raise problem
        return results

    def _watch(self) -> None:
        """End the group when one of its processes ends, so that nobody waits for it; report those
        that are stopped."""
        reported = 0
        handles: list[Connection | int] = [self._closing, *(other.pidfd for other in self._others)]
        while not (ended := wait(handles, LOOK_S)):
            stopped = next((other.pid for other in self._others if other.is_stopped), 0)
            if stopped != reported and self._report is not None:
                self._report(stopped)
                reported = stopped
        if self._closing not in ended:
            self.memory.end()

    def _describe_end(self) -> str:
        dead = [other for other in self._others if other.has_ended]
        return "; ".join(other.describe_end() for other in dead) or "the group ended"
