"""All exception classes of shmllm, and the nearest name for their messages.

    ShmLLMError
    ├── RequestError (ValueError)     the request is invalid; the engine keeps running
    │   ├── EnginePausedError         the engine accepts no requests now; try again later
    │   └── CallOrderError (RuntimeError)   a call came before or after the wrong call
    ├── EngineStartError              the engine did not start
    ├── EngineDeadError               the engine process ended; its requests are lost
    ├── RankDeadError                 another process that computes the engine's model ended
    ├── QuantizeError                 a model cannot be quantized, or not be written
    ├── CallError                     a call in the engine raised; the engine keeps running
    └── IpcError                      an error of shared memory
        ├── SegmentError              cannot create, attach or use a segment
        ├── NoSpaceError              shared memory is full
        ├── ProtocolMismatchError     the bytes do not conform to this protocol version
        ├── MessageTooLargeError      a message is larger than the ring or slot
        ├── DeviceMemoryError         memory of a GPU cannot be shared
        └── IpcTimeoutError (TimeoutError)   a deadline passed

The code that raises an error writes its message, which contains the numbers that the user needs
and says what the user can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_COMPARED_CHARACTERS = 100


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.0) -> str | None:
    """The choice that is most similar to an unknown name; None if there is no choice, or none whose
    similarity, from 0 to 1, reaches the cutoff.

    Only the beginning of the name is compared: an engine compares names that a faulty front end
    sends, and a name of 20 MB would take half a minute.
    """
    import difflib

    near = difflib.get_close_matches(name[:_COMPARED_CHARACTERS], list(choices), n=1, cutoff=cutoff)
    return near[0] if near else None


class ShmLLMError(Exception):
    """Base class of all exceptions of shmllm."""


class RequestError(ShmLLMError, ValueError):
    """The request is invalid. Nothing was queued, and the engine keeps running.

    Attributes:
        parameter: the name of the parameter that is wrong; None if it is not one of them.
        value: its value, or None.
    """

    def __init__(
        self, *message: object, parameter: str | None = None, value: object = None
    ) -> None:
        super().__init__(*message)
        self.parameter = parameter
        self.value = value


class EnginePausedError(RequestError):
    """The engine accepts no new requests while it is paused or asleep. The same request can be
    sent again when the engine continues."""


class CallOrderError(RequestError, RuntimeError):
    """The call requires another call before it, or must not follow one. It had no effect."""


class EngineStartError(ShmLLMError):
    """The engine process did not become ready.

    Attributes:
        remote_traceback: the engine's traceback as text. It is empty if the cause is the
            user's input, such as an unknown model, and the message is sufficient.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.remote_traceback}" if self.remote_traceback else message


class RankDeadError(ShmLLMError):
    """A process of a group has ended, and with it the group. Its engine raises this and ends, so
    that its front ends raise EngineDeadError."""


class QuantizeError(ShmLLMError):
    """A model cannot be quantized, or the result cannot be written. The message is one line."""


class EngineDeadError(ShmLLMError):
    """The engine process has ended. Its unfinished requests are lost.

    Attributes:
        exit_code: the exit code of the process; None if a signal ended it, or if the exit
            status could not be read.
        signal: the number of the signal that ended the process, or None.
        remote_traceback: the traceback that the engine wrote before it ended; empty if it
            wrote none.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.remote_traceback}" if self.remote_traceback else message


class CallError(ShmLLMError):
    """A call raised an exception in the engine process. The engine keeps running.

    Attributes:
        remote_traceback: the engine's traceback as text.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.remote_traceback}" if self.remote_traceback else message


def as_exception(problem: BaseException) -> Exception:
    """Returns what a function of a caller raised, as an Exception: anything else would end the
    process that runs it."""
    if isinstance(problem, Exception):
        return problem
    if isinstance(problem, SystemExit):
        return RuntimeError(f"the function called exit({problem.code!r})")
    return RuntimeError(f"the function raised {type(problem).__name__}: {problem}")


class IpcError(ShmLLMError):
    """Base class of the errors of shared memory."""


class SegmentError(IpcError):
    """A shared-memory segment cannot be created, attached or used."""


class NoSpaceError(IpcError):
    """The file system of shared memory is full. The message has the needed and the free bytes."""


class ProtocolMismatchError(IpcError):
    """Bytes in shared memory do not conform to this version of the protocol."""


class MessageTooLargeError(IpcError):
    """A message is larger than its ring or slot. The error text contains both sizes."""


class DeviceMemoryError(IpcError):
    """Memory of a GPU cannot be shared between two processes. The message has the cause."""


class IpcTimeoutError(IpcError, TimeoutError):
    """A wait reached its deadline."""


REFUSALS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (RequestError, EnginePausedError, CallOrderError)
}
"""The exceptions with which an engine refuses a call, by the name in its answer."""
