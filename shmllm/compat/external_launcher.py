"""One engine for several trainer processes, as vLLM's executor "external_launcher" has it.

A launcher such as torchrun starts the processes. Each group of consecutive ranks, as many as
`tensor_parallel_size` times `pipeline_parallel_size`, makes the same calls. The group's first
process has the engine and shares what each call returns or raises; the others wait for that. This
module knows nothing of trainers.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

from shmllm import errors
from shmllm.errors import CallOrderError, EngineDeadError, ShmLLMError
from shmllm.frontend.engine_view import EngineView

BACKEND = "external_launcher"
"""The value of vLLM's option `distributed_executor_backend`."""

_SHARED = """
    abandon_weight_update add_lora align apply_model beam_search chat classify collective_rpc
    compute_weight_checksums embed encode enqueue enqueue_chat finish_weight_update generate
    get_default_sampling_params get_metrics get_tokenizer get_weight_version get_world_size
    health is_paused is_sleeping list_loras pause_generation pin_lora release_kv_cache_memory
    remove_lora reset_encoder_cache reset_mm_cache reset_prefix_cache resume_generation score
    score_tokens sleep start_profile start_weight_update stop_profile transcribe
    update_weight_version wait_for_completion wake_up _num_unfinished
"""
CALLS = frozenset(_SHARED.split())
"""The methods of `LLM` that the first process makes for all."""

_OF_PYTHON = {kind.__name__: kind for kind in (TypeError, ValueError, RuntimeError)}


def is_launched(options: Mapping[str, Any]) -> bool:
    """Whether options of an LLM name this backend, in a process of a launcher."""
    return options.get("distributed_executor_backend") == BACKEND and "RANK" in os.environ


def _join_default_group() -> None:
    """Make the processes of the launcher torch.distributed's default group, as vLLM does,
    unless they are one already."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_leave_groups)


def _leave_groups() -> None:
    """End the threads of the groups, which may abort the process if they are left."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def group_size(options: Mapping[str, Any]) -> int:
    """How many processes share an engine: as many as it has ranks."""
    return prod(options.get(f"{each}_parallel_size") or 1 for each in ("tensor", "pipeline"))


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the engine of this process or of its group: without the backend, and with the
    GPU that the launcher meant for the process."""
    import torch

    own = {name: options[name] for name in options if name != "distributed_executor_backend"}
    gpu = int(os.environ.get("LOCAL_RANK", 0))
    return {"device": f"cuda:{gpu}"} | own if 0 < gpu < torch.cuda.device_count() else own


class Group(Protocol):
    """Processes that make the same calls in the same order.

    Attributes:
        leads: whether this process is the first one.
    """

    leads: bool

    def share(self, data: bytes) -> bytes:
        """Returns the first process's `data` in each process.

        Raises:
            ShmLLMError: a process has ended, or did not arrive before the deadline.
        """
        ...


class TorchGroup:
    """Consecutive ranks of torch.distributed, which exchange data by gloo.

    A wait lasts at most as long as one of the default group (`ddp_timeout` of a trainer).

    Args:
        size: the number of processes of a group. All processes have to make their groups together.

    Raises:
        ShmLLMError: torch.distributed has not begun, or `size` does not divide its processes.
    """

    def __init__(self, size: int) -> None:
        import torch.distributed as dist

        world = dist.get_world_size() if dist.is_initialized() else 0
        if not world or world % size:
            raise ShmLLMError(
                f"{BACKEND}: {size} processes share an engine, and torch.distributed has {world}: "
                f"start a multiple of {size} with torchrun"
            )
        groups = [list(range(first, first + size)) for first in range(0, world, size)]
        self._first = dist.get_rank() // size * size
        self._deadline = _timeout_of_default_group()
        self._group, _ = dist.new_subgroups_by_enumeration(
            groups, timeout=self._deadline, backend="gloo"
        )
        self.leads = dist.get_rank() == self._first

    def share(self, data: bytes) -> bytes:
        import torch.distributed as dist

        shared = [data]
        try:
            dist.broadcast_object_list(shared, src=self._first, group=self._group)
        except RuntimeError as error:
            how = f"ended, or did not call for {self._deadline}: {error}"
            if self.leads:
                raise ShmLLMError(f"another process that shares the engine {how}") from error
            raise EngineDeadError(f"process {self._first}, which has the engine, {how}") from error
        return shared[0]


def _timeout_of_default_group() -> Any:
    """The timedelta of torch.distributed's default group, which torch does not tell otherwise."""
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout


@dataclass(frozen=True)
class _Outcome:
    """What a call of the first process led to.

    Attributes:
        call: its name.
        value: what it returned.
        kind: the name of the exception's class; empty: it raised none.
        text: the exception's text.
    """

    call: str
    value: Any = None
    kind: str = ""
    text: str = ""

    def result(self, call: str) -> Any:
        """Returns the value, or raises the exception, to a process that made the call `call`."""
        if call != self.call:
            raise CallOrderError(
                f"this process called {call} and the one that has the engine {self.call}: all "
                "processes of a group must make the same calls"
            )
        if not self.kind:
            return self.value
        kind = getattr(errors, self.kind, _OF_PYTHON.get(self.kind))
        raise kind(self.text) if kind else ShmLLMError(f"{self.kind}: {self.text}")


class SharedLLM:
    """The `LLM` of a group of processes. All of them must make the same calls in the same order.

    The arguments of the first process count, except that each process iterates over the weights
    that it gives. It has the methods of `LLM`, without those that stream or that let a trainer
    send weights itself. `close` is local.

    Args:
        group: the processes.
        make: makes the LLM; called in the first process only.

    Raises:
        EngineStartError: in all processes, if the engine does not start.
    """

    def __init__(self, group: Group, make: Callable[[], Any]) -> None:
        self._group = group
        self._llm: Any = None

        def start() -> tuple[Any, ...]:
            self._llm = make()
            return self._llm.facts, self._llm.model_defaults, self._llm.engine_pid

        self.facts, self.model_defaults, self.engine_pid = self._together("LLM", start)

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(f"processes that share an engine have no LLM.{name}")
        return partial(self._call, name)

    def update_weights(self, weights: Any, **options: Any) -> None:
        """`LLM.update_weights`. A generator may gather each tensor from all processes."""
        self._send("update_weights", weights, options)

    def _load_weights(self, weights: Any) -> set[str]:
        replaced: set[str] = self._send("_load_weights", weights, {})
        return replaced

    @property
    def llm_engine(self) -> EngineView:
        """The engine's configuration and model, under vLLM's names."""
        host: Any = self
        return EngineView(host)

    @property
    def model_config(self) -> Any:
        """`llm_engine.model_config`."""
        return self.llm_engine.model_config

    def close(self) -> None:
        """Ends the engine, if this process has it."""
        if self._llm is not None:
            self._llm.close()

    shutdown = close

    def __enter__(self) -> SharedLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        return self._together(name, lambda: getattr(self._llm, name)(*args, **options))

    def _send(self, name: str, weights: Any, options: Mapping[str, Any]) -> Any:
        pairs = iter(weights.items() if isinstance(weights, Mapping) else weights)
        return self._together(name, lambda: getattr(self._llm, name)(pairs, **options), pairs)

    def _together(self, name: str, call: Callable[[], Any], pairs: Iterable[Any] = ()) -> Any:
        """Makes a call in the first process, and returns or raises the same in all.

        Args:
            name: of the call.
            call: the call.
            pairs: what it iterates over; the other processes do so too.
        """
        if not self._group.leads:
            _exhaust(pairs)
            return pickle.loads(self._group.share(b"")).result(name)
        try:
            value = call()
            data = pickle.dumps(_Outcome(name, value))
        except Exception as error:
            _exhaust(pairs)
            text = str(error)
            self._group.share(pickle.dumps(_Outcome(name, None, type(error).__name__, text)))
            raise
        _exhaust(pairs)
        self._group.share(data)
        return value


def _exhaust(pairs: Iterable[Any]) -> None:
    for _ in pairs:
        pass


def shared_llm(options: Mapping[str, Any], make: Callable[..., Any]) -> SharedLLM | None:
    """The LLM that processes of a launcher share, as many as the engine has ranks; None: each has
    its own engine. The processes become torch.distributed's default group, as with vLLM.

    Args:
        options: of the engine.
        make: makes the LLM of some options.
    """
    if not is_launched(options):
        return None
    _join_default_group()
    size = group_size(options)
    return SharedLLM(TorchGroup(size), lambda: make(**own_options(options))) if size > 1 else None
