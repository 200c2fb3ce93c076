"""The interface of an engine's client: the methods that a front end calls on an engine.

`PrivateEngineClient`, `AttachedEngineClient`, `LocalEngineClient` and, for several engines,
`EnginePool` implement it. This module must not know in which process the engine runs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shmllm.config.front_end import Progress
from shmllm.config.info import EngineInfo
from shmllm.errors import EngineDeadError
from shmllm.ipc.error_log import LoggedError as LoggedError
from shmllm.outputs.columns import Embeddings, MaskColumns, OutputColumns, RoutedColumns
from shmllm.outputs.logprobs import PromptLogprobs
from shmllm.params.request import EngineCoreRequest
from shmllm.tracing.recorder import Recorder
from shmllm.wire.messages import Method, Rejected, WeightVersion
from shmllm.wire.rpc import RpcCall


@dataclass(frozen=True, slots=True)
class StartedOver:
    """A request begins again at another engine, because its engine has ended: the outputs that
    `poll` has returned for it come again.

    Attributes:
        number: the number of the request.
    """

    number: int


EngineOutput = (
    OutputColumns
    | PromptLogprobs
    | Embeddings
    | RoutedColumns
    | MaskColumns
    | Rejected
    | WeightVersion
    | StartedOver
)
"""An event that `poll` returns."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The functions to call with the progress of an engine's start.

    Attributes:
        on_load: called with (bytes read, bytes in all) while the weights are read.
        on_capture: called with (sizes captured, sizes in all) while CUDA graphs are captured.
    """

    on_load: Progress | None = None
    on_capture: Progress | None = None


NO_PROGRESS = StartProgress()


def ignore_trace(directory: str) -> None:
    """The default of `EngineClient.on_trace`."""


class BucketMemory(Protocol):
    """The memory of a bucket of new weights, such as an `ipc.slots.Slot`.

    Attributes:
        buffer: the bytes to fill.
    """

    buffer: memoryview


class DeviceMemory(Protocol):
    """One end of memory on a GPU that a front end and its engine share.

    Attributes:
        tensor: (bytes,) uint8, a torch.Tensor over the memory.
    """

    tensor: Any

    def close(self) -> None:
        """Free the memory, or end the mapping. Idempotent.

        Raises:
            DeviceMemoryError: the driver refused.
        """


class ExportedDeviceMemory(DeviceMemory, Protocol):
    """The front end's end, which has to be closed after the engine's.

    Attributes:
        handle: a text with which the engine maps the memory.
    """

    handle: str


class DeviceSharing(Protocol):
    """Shares memory of a GPU between two processes, such as `ipc.device_memory.CudaSharing`.
    Devices are `torch.device` objects."""

    def uuid(self, device: Any) -> str:
        """A text that identifies a GPU in all processes; empty for a device that is none."""

    def export(self, num_bytes: int, device: Any) -> ExportedDeviceMemory:
        """Allocate memory that another process can map. Raises DeviceMemoryError."""

    def open(self, handle: str, num_bytes: int, device: Any) -> DeviceMemory:
        """Map the memory of a handle. Raises DeviceMemoryError."""

    def synchronize(self, device: Any) -> None:
        """Wait until the copies that this thread has launched are done."""


class EngineClient(Protocol):
    """A connection of a front end to an engine.

    Attributes:
        info: the information that the engine reports; set by `wait_ready`.
        sharing: shares memory of the engine's GPU with the engine.
        connection: a number that identifies this connection, for traces.
        seed: the seed of requests that have none: the engine's, or for a front end that shares the
            engine with others a random one.
        on_trace: called with a trace's directory if the engine asks this front end to record
            there, too.
    """

    info: EngineInfo
    sharing: DeviceSharing
    connection: int
    seed: int
    on_trace: Callable[[str], None]

    @property
    def pid(self) -> int:
        """The pid of the engine's process."""

    def add(self, request: EngineCoreRequest) -> None:
        """Submit a request. Its number must not have been used before."""

    def abort(self, numbers: Sequence[int]) -> None:
        """End requests. `poll` then returns the last row of each one that had not ended."""

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        """Return new events in order.

        The caller removes from the list what it has processed. The next call returns the rest
        again, before newer events, so that no event is lost if an exception ends the caller.

        Args:
            timeout_s: how many seconds to wait for the first event. The method may return
                earlier, without events.
            urgent_only: wait for urgent events only. Tokens of requests that continue are not
                urgent; the tokens of several steps are then returned together.
        """

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return now."""

    def call(self, method: Method, argument: Any = None) -> Any:
        """Call a method of the engine and wait for its result, a JSON value.

        Args:
            method: the method.
            argument: its argument, a JSON value.

        Raises:
            RequestError: the engine refused the call.
            CallError: the method raised an exception.
        """

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """Run a method or a function on the engine's worker between two steps, and wait for its
        result.

        Args:
            call: the method or function, and its arguments.
            timeout_s: how many seconds to wait; None waits until the engine ends.

        Raises:
            RequestError: the call cannot be transmitted, or the engine refused it.
            CallError: the method or function raised an exception.
            IpcTimeoutError: no reply arrived in time. The engine may still run the call.
        """

    def trace(self, recorder: Recorder | None) -> None:
        """Record the messages of this connection in a trace; None ends the recording."""

    def claim_bucket(self) -> BucketMemory:
        """Return BUCKET_BYTES of memory for new weights, as soon as some is free. The caller has
        to pass it to `send_bucket` or to call `discard_bucket`, before it claims another one."""

    def discard_bucket(self) -> None:
        """Give the memory of `claim_bucket` back, unless `send_bucket` has sent it. Idempotent."""

    def send_bucket(self, bucket: BucketMemory, pieces: str) -> None:
        """Send a bucket of new weights, for this front end's update in progress. The engine does
        not reply; the next call of the update reports problems.

        Args:
            bucket: the memory that `claim_bucket` returned, filled.
            pieces: the list of the bucket's pieces; see `wire.weight_bucket`.
        """

    def stats(self) -> dict[str, int]:
        """The engine's counters and gauges, by name in lower case."""

    def health(self) -> str:
        """The engine's state in words, such as "ready", "stalled 7 s in step 12" or "dead". Those
        of a pool's engines, if they differ, as "engine 0: ready; engine 1: dead"."""

    def errors(self) -> list[LoggedError]:
        """The distinct errors that the engine process has recorded, the latest one last."""

    def stop(self) -> None:
        """Begin to close the connection: calls that wait in other threads raise an error.
        Idempotent."""

    def close(self) -> None:
        """Close the connection. A private engine ends; a named engine continues. Idempotent."""


class EngineHandle(Protocol):
    """A handle of an engine process, which tells whether and how the process ended."""

    pid: int

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the end. Returns whether the process has ended."""

    def exit_status(self) -> tuple[int | None, int | None]:
        """The (exit code, signal) of the ended process; None for each one that is unknown."""


def death_of(engine: EngineHandle, last_words: str) -> EngineDeadError:
    """The error that says how an engine process ended.

    Args:
        engine: the handle of the ended process.
        last_words: what the engine wrote as the cause; "" if it could not.
    """
    exit_code, number = engine.exit_status()
    if number is not None:
        cause = f"killed by {signal.Signals(number).name}"
    elif exit_code is not None:
        cause = f"exit code {exit_code}"
    else:
        cause = "its exit status is lost"
    return EngineDeadError(
        f"engine process {engine.pid} died ({cause})",
        exit_code=exit_code,
        signal=number,
        remote_traceback=last_words,
    )
