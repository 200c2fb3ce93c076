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
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from shmllm.config.engine import EngineConfig
from shmllm.ipc.liveness import wait_for_end
from shmllm.ipc.wait import WaitPolicy
from shmllm.models.fields import Fields
from shmllm.outputs.sleep_report import OwnedBytes, SleepState
from shmllm.parallel.cores import cores_of, threads_of_a_rank
from shmllm.parallel.memory import PARK_S, GroupMemory, Place
from shmllm.parallel.staging import StagedTensor, Staging
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.cpu.group import Kind
from shmllm.worker.cpu.lora import CpuAdapter
from shmllm.worker.cpu.part import CpuPart
from shmllm.worker.cpu.pipeline import CpuPipeline
from shmllm.worker.cpu.program import CpuProgram
from shmllm.worker.cpu.runner import TABLES
from shmllm.worker.memory import CacheSize
from shmllm.worker.memory_owners import MemoryOwners
from shmllm.worker.profile import Recording, path_of_rank

WAIT_POLICY = WaitPolicy(0, 0, PARK_S, PARK_S)
"""How a rank waits for a step that has not come while it looked for it: it sleeps."""


@dataclass(slots=True)
class _Tables:
    """See `worker.batch.StepTables`."""

    block_tables: IntArray
    max_samples: int


class RankWorker:
    """The first argument of functions that a front end runs in this rank; see
    `engine.worker.Worker`.

    Attributes:
        rank, local_rank: the number of the rank.
        model: its part of the model. Names, shapes and `load_weights` are those of the whole one.
        model_runner: what owns the model.
        device: the torch.device of the weights.
    """

    def __init__(self, rank: int, part: CpuPart) -> None:
        self.rank = self.local_rank = rank
        self.model = part.loaded.model
        self.model_runner = part.loaded
        self.device = torch.device("cpu")

    def get_model(self) -> Any:
        """The model, as the method of vLLM's worker returns it."""
        return self.model


class RankServer:
    """What a rank can be told to do, by the names of the methods.

    Args:
        config: the configuration of the engine.
        memory: the memory of the group.
        staging: the memory for new weights.
    """

    def __init__(self, config: EngineConfig, memory: GroupMemory, staging: Staging) -> None:
        num_threads = threads_of_a_rank(config.num_threads, config.parallel)
        cores = cores_of(memory.rank, num_threads, memory.size)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        self._config = config
        self._memory = memory
        self._staging = staging
        self._part = CpuPart(config, memory, num_threads)
        self._model = self._part.loaded.model
        self._worker = RankWorker(memory.rank, self._part)
        self._recording: Recording | None = None
        self._loras: dict[int, CpuAdapter] = {}
        self._tensors_of_loras: dict[int, dict[str, Tensor]] = {}

    def play(self, kind: Kind, slot: int) -> None:
        """Compute this rank's part of a step."""
        if kind is Kind.STEP:
            self._part.copy_states(self._program.inputs_of(slot))
        self._program.play(kind, slot)

    def build(self, size: CacheSize, places: dict[str, Place]) -> int:
        """Make the KV cache and the program. Returns the size of the weights.

        Args:
            size: the size of the cache.
            places: where rank 0 has made the arrays that the ranks share.
        """
        self._memory.places = places
        tables = self._memory.array(TABLES, *places[TABLES][1], dtype="int32")
        num_rows, max_drafts = tables.shape[1], self._config.max_drafts
        self._part.build(size, _Tables(tables, num_rows + max_drafts))
        program = self._part.program
        assert isinstance(program, CpuProgram | CpuPipeline), "the options refuse other models"
        self._program = program
        weights = self._part.loaded.weights
        workspaces = [self._program.buffers]
        self._owners = MemoryOwners(
            self._model, weights, self._part.kv_cache, workspaces, self._part.pool
        )
        return weights.num_bytes

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
        """Run a function; see `worker.cpu.ranks.Ranks.call`."""
        import cloudpickle  # type: ignore[import-untyped]

        function, args, kwargs = cloudpickle.loads(data)
        try:
            return function(self._worker, *args, **kwargs)
        except SystemExit as problem:
            raise RuntimeError(f"the function called exit({problem.code!r})") from problem

    def read_weight(self, name: str) -> Tensor:
        """Return a weight of which this rank has a part, with zeros elsewhere."""
        return self._model.destinations()[name][0].clone()

    def write(self, batch: list[StagedTensor]) -> None:
        """Write this rank's part of new weights."""
        with self._staging.read(batch) as tensors:
            self._model.write(tensors)

    def take_lora(self, number: int, batch: list[StagedTensor]) -> None:
        """Copy tensors of a low-rank adapter.

        Args:
            number: the number of the adapter, among those that rank 0 has made.
            batch: some of its tensors, under the names of adapter_model.safetensors.
        """
        taken = self._tensors_of_loras.setdefault(number, {})
        with self._staging.read(batch) as tensors:
            taken |= {name: tensor.clone() for name, tensor in tensors}

    def make_lora(self, number: int, config: Fields) -> LongArray:
        """Make this rank's share of an adapter, of its tensors. Returns its `CpuAdapter.entries`.

        Args:
            number: as for `take_lora`.
            config: the fields of adapter_config.json.
        """
        lora, tensors = self._part.lora, self._tensors_of_loras.pop(number)
        assert lora is not None, "the engine has adapters"
        self._loras[number] = lora.adapter_of(config, Fields(tensors, config.where))
        return self._loras[number].entries

    def drop_loras(self, numbers: list[int]) -> None:
        """Free this rank's shares of adapters, of which some may not have been made."""
        for number in numbers:
            self._loras.pop(number, None)
            self._tensors_of_loras.pop(number, None)

    def observe(self, is_observed: bool) -> None:
        """Run kernels one by one, so that a recording has each, or all of a step in one call."""
        self._program.observe = record_function if is_observed else None

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

    def reload(self, directory: str | None) -> str:
        """See `LoadedModel.reload`."""
        return self._part.loaded.reload(directory)

    def weights_version(self) -> int:
        """Return how often the weights were written."""
        return self._model.weights_version

    def damage_weights(self) -> None:
        """Record that the weights are of no use."""
        self._model.weights_damaged()


def serve(
    server: RankServer, memory: GroupMemory, commands: Connection, replies: Connection
) -> None:
    """Do what rank 0 says, until it closes the pipe or ends the group."""
    waiter = memory.waiter(WAIT_POLICY)
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
            name, arguments = pickle.loads(commands.recv_bytes())
        except EOFError:
            return
        reply = _reply(server, name, arguments)
        memory.has_left()
        replies.send_bytes(reply)


def _reply(server: RankServer, name: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((True, getattr(server, name)(*arguments), ""))
    except Exception as problem:
        return _failure(problem)


def _failure(problem: Exception) -> bytes:
    try:
        return pickle.dumps((False, problem, traceback.format_exc()))
    except Exception:
        plain = RuntimeError(f"{type(problem).__name__}: {problem}")
        return pickle.dumps((False, plain, traceback.format_exc()))


def _end_with(pidfd: int) -> None:
    """End this process when the engine ends, whatever it does then."""

    def watch() -> None:
        while not wait_for_end(pidfd, 3600):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="shmllm-engine-watcher", daemon=True).start()


def run(arguments: list[str]) -> int:
    """Run the rank that the arguments of `python -m shmllm.parallel` describe. Returns the exit
    code."""
    rank, size, memory_fd, staging_fd, read_fd, write_fd, pidfd = map(int, arguments)
    for fd in (memory_fd, staging_fd, read_fd, write_fd, pidfd):
        os.set_inheritable(fd, False)
    _end_with(pidfd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.enable()
    commands, replies = Connection(read_fd, writable=False), Connection(write_fd, readable=False)
    config = EngineConfig.from_json(commands.recv_bytes().decode())
    is_pipeline = config.parallel.pipeline_parallel_size > 1
    memory, staging = GroupMemory(memory_fd, rank, size, is_pipeline), Staging(staging_fd)
    try:
        server = RankServer(config, memory, staging)
    except Exception as problem:
        replies.send_bytes(_failure(problem))
        return 2
    replies.send_bytes(pickle.dumps((True, None, "")))
    try:
        serve(server, memory, commands, replies)
    except Exception as problem:
        replies.send_bytes(_failure(problem))
        return 1
    return 0
