"""The process of a rank other than 0: it loads its part of the model, and does what it is told.

A rank knows nothing of requests. It computes the steps that rank 0 begins, from the inputs that
rank 0 has written into the memory of the group, and runs the commands that come through its pipe.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from shmllm.config.engine import EngineConfig
from shmllm.errors import as_exception
from shmllm.ipc.liveness import wait_for_end
from shmllm.models.fields import Fields
from shmllm.outputs.sleep_report import OwnedBytes, SleepState
from shmllm.parallel.adapters import RankAdapters
from shmllm.parallel.memory import GroupMemory
from shmllm.parallel.rank_tracing import RankTracing
from shmllm.parallel.replies import pack_failure, pack_result
from shmllm.parallel.staging import StagedTensor, StagingReader
from shmllm.plugins.entry_points import keep_vllm_names, load_general_plugins, search_also
from shmllm.sigbus import bus_guard
from shmllm.tracing.layout import Slice
from shmllm.worker.arrays import LongArray
from shmllm.worker.group import Kind
from shmllm.worker.loaded_runner import Observe
from shmllm.worker.loading import LoadedModel
from shmllm.worker.memory import CacheSize
from shmllm.worker.memory_owners import MemoryOwners
from shmllm.worker.profile import Recording, path_of_rank

if TYPE_CHECKING:
    from shmllm.worker.cpu.shared_cache import CpuSharedCache

T = TypeVar("T")


class RankPart(Protocol):
    """A rank's part of a model, on its device.

    Attributes:
        loaded: the weights.
        torch_device: where they are.
        traced_as: what a trace calls its part of a step: RANK_STEP or RANK_LAUNCH.
        adapters: its shares of low-rank adapters, if the engine has them, after `build`.
        shared: its part of the blocks that engines share, if they do.
    """

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def shared(self) -> CpuSharedCache | None: ...

    adapters: RankAdapters | None
    torch_device: torch.device
    traced_as: Slice

    def size_cache(self) -> CacheSize:
        """Return the size of the KV cache that fits, of which all ranks get the smallest."""

    def build(self, size: CacheSize) -> MemoryOwners:
        """Make the KV cache and the program. Returns the memory of this process."""

    def play(self, kind: Kind, slot: int) -> None:
        """Compute this rank's part of a step, or of a scoring."""

    def observe(self, observe: Observe | None) -> None:
        """See `LoadedRunner.observe`."""


class RankWorker:
    """The first argument of functions that a front end runs in this rank; see
    `engine.worker.Worker`.

    Attributes:
        rank, local_rank: the number of the rank.
        model: its part of the model. Names, shapes and `load_weights` are those of the whole one.
        model_runner: what owns the model; it has a `model`.
        device: the torch.device of the weights.
    """

    def __init__(self, rank: int, part: RankPart) -> None:
        self.rank = self.local_rank = rank
        self.model = part.loaded.model
        self.model_runner = SimpleNamespace(model=self.model)
        self.device = part.torch_device

    def get_model(self) -> Any:
        """The model, as the method of vLLM's worker returns it."""
        return self.model


class RankServer:
    """What a rank can be told to do, by the names of the methods.

    Args:
        part: its part of the model.
        memory: the memory of the group.
        staging: the memory for new weights.
    """

    def __init__(self, part: RankPart, memory: GroupMemory, staging: StagingReader) -> None:
        self._memory = memory
        self._staging = staging
        self._part = part
        self._model = part.loaded.model
        self._worker = RankWorker(memory.rank, part)
        self._recording: Recording | None = None
        self._tracing = RankTracing(memory, part.traced_as)

    def play(self, kind: Kind, slot: int) -> None:
        """Compute this rank's part of a step."""
        if self._tracing.recorder is None:
            self._part.play(kind, slot)
            return
        with self._tracing.step(kind):
            self._part.play(kind, slot)

    def size_cache(self) -> CacheSize:
        """See `RankPart.size_cache`. The group ends if it raises, so that none waits for this
        rank."""
        return self._or_end(self._part.size_cache)

    def build(self, size: CacheSize) -> int:
        """Make the KV cache and the program. Returns the size of the weights. The group ends if it
        raises."""
        self._owners = self._or_end(lambda: self._part.build(size))
        return self._part.loaded.weights.num_bytes

    def _or_end(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException:
            self._memory.end()
            raise

    def release(self, part: SleepState, keep: bool) -> None:
        """See `MemoryOwners`, as for the following."""
        self._owners.release(part, keep)

    def restore(self, part: SleepState) -> None:
        self._owners.restore(part)

    def tidy(self) -> None:
        self._owners.tidy()

    def measure(self) -> OwnedBytes:
        return self._owners.measure()

    def call(self, data: bytes) -> Any:
        """Run a function; see `worker.ranks.Ranks.call`."""
        import cloudpickle  # type: ignore[import-untyped]

        function, args, kwargs = cloudpickle.loads(data)
        try:
            return function(self._worker, *args, **kwargs)
        except BaseException as problem:
            raise as_exception(problem) from problem

    def read_weight(self, name: str) -> Tensor:
        """Return a weight of which this rank has a part, with zeros elsewhere."""
        return self._model.destinations()[name][0].clone().cpu()

    def write(self, batch: list[StagedTensor]) -> None:
        """Write this rank's part of new weights."""
        self._model.write(self._staging.read(batch))

    def take_lora(self, number: int, batch: list[StagedTensor]) -> None:
        """See `RankAdapters.take`, as for the following."""
        self._adapters.take(number, self._staging.read(batch))

    def make_lora(self, number: int, config: Fields) -> LongArray:
        return self._adapters.make(number, config)

    def drop_loras(self, numbers: list[int]) -> None:
        self._adapters.drop(numbers)

    @property
    def _adapters(self) -> RankAdapters:
        assert self._part.adapters is not None, "the engine has adapters"
        return self._part.adapters

    def share(self, method: str, *arguments: Any) -> Any:
        """Call a method of this rank's part of the blocks that engines share; see
        `worker.cpu.group_shared_cache`."""
        return getattr(self._part.shared, method)(*arguments)

    def observe(self, is_observed: bool) -> None:
        """Run kernels one by one, so that a recording has each, or all of a step in one call."""
        self._part.observe(record_function if is_observed else None)

    def begin_recording(self) -> None:
        """Record the steps of this rank from now on."""
        self._recording = Recording()

    def end_recording(self) -> None:
        """Stop recording."""
        assert self._recording is not None, "a recording has begun"
        self._recording.end()

    def write_recording(self, path: Path) -> None:
        """Write the trace, beside that of rank 0, whose path is given."""
        assert self._recording is not None, "a recording has ended"
        self._recording.write(path_of_rank(path, self._worker.rank))
        self._recording = None

    def begin_trace(self, directory: Path) -> None:
        """See `RankTracing.begin`."""
        self._tracing.begin(directory)

    def reload(self, directory: str | None) -> str:
        """See `LoadedModel.reload`."""
        return self._part.loaded.reload(directory)

    def weights_version(self) -> int:
        """Return how often the weights were written."""
        return self._model.weights_version

    def damage_weights(self) -> None:
        """Record that the weights are of no use."""
        self._model.weights_damaged()


def _make_part(
    config: EngineConfig, memory_fd: int, rank: int, size: int
) -> tuple[GroupMemory, RankPart]:
    """Load plugins, whose problems rank 0 reports, and this rank's part of the model. Only the
    modules of its device are imported."""
    search_also(config.plugins.search_path)
    keep_vllm_names(is_needed=config.plugins.runs_code_of_others)
    load_general_plugins()
    if config.device.startswith("cuda"):
        from shmllm.parallel.gpu_rank import make_gpu_part

        return make_gpu_part(config, memory_fd, rank, size)
    from shmllm.parallel.cpu_rank import CpuRankPart

    memory = GroupMemory(memory_fd, rank, size, config.parallel.pipeline_parallel_size > 1)
    return memory, CpuRankPart(config, memory)


def serve(
    server: RankServer, memory: GroupMemory, commands: Connection, replies: Connection
) -> None:
    """Do what rank 0 says, until it closes the pipe or ends the group."""
    waiter = memory.waiter()
    while not memory.has_ended:
        found = memory.next_step(waiter)
        if found is None:
            continue
        kind, slot = found
        if kind is not Kind.COMMAND:
            server.play(kind, slot)
            memory.has_left()
            continue
        try:
            name, arguments, places = pickle.loads(commands.recv_bytes())
        except EOFError:
            return
        memory.places.update(places)
        reply = _reply(server, name, arguments)
        memory.has_left()
        replies.send_bytes(reply)


def _reply(server: RankServer, name: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return pack_result(getattr(server, name)(*arguments))
    except Exception as problem:
        return pack_failure(problem)


def _end_with(pidfd: int, at_end: list[Callable[[], None]]) -> None:
    """End this process when the engine ends, whatever it does then.

    Args:
        pidfd: that of the engine.
        at_end: called before, so that no GPU waits for a rank that has ended.
    """

    def watch() -> None:
        while not wait_for_end(pidfd, 3600):
            pass
        for call in at_end:
            call()
        os._exit(0)

    threading.Thread(target=watch, name="shmllm-engine-watcher", daemon=True).start()


def run(arguments: list[str]) -> int:
    """Run the rank that the arguments of `python -m shmllm.parallel` describe. Returns the exit
    code."""
    rank, size, memory_fd, staging_fd, read_fd, write_fd, pidfd = map(int, arguments)
    for fd in (memory_fd, staging_fd, read_fd, write_fd, pidfd):
        os.set_inheritable(fd, False)
    at_end: list[Callable[[], None]] = []
    _end_with(pidfd, at_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.enable()
    bus_guard.install()
    commands, replies = Connection(read_fd, writable=False), Connection(write_fd, readable=False)
    config = EngineConfig.from_json(commands.recv_bytes().decode())
    try:
        memory, part = _make_part(config, memory_fd, rank, size)
        at_end.append(memory.end)
        server = RankServer(part, memory, StagingReader(staging_fd))
    except Exception as problem:
        replies.send_bytes(pack_failure(problem))
        return 2
    replies.send_bytes(pack_result(None))
    try:
        serve(server, memory, commands, replies)
    except Exception as problem:
        replies.send_bytes(pack_failure(problem))
        return 1
    return 0
