"""Every exception that shmllm raises on purpose.

    ShmLLMError
    ├── RequestError (ValueError)     this request is wrong; the engine lives on
    │   ├── EnginePausedError         it is not wrong: try again when the engine goes on
    │   └── CallOrderError (RuntimeError)   calls that belong together came out of order
    ├── EngineStartError              the engine did not come up; says why
    ├── EngineDeadError               the engine died; every request of it is lost
    ├── CallError                     what the engine was asked to do raised; it lives on
    └── IpcError                      shared memory
        ├── SegmentError              cannot create, attach or use a segment
        ├── NoSpaceError              shared memory is full
        ├── ProtocolMismatchError     the bytes are not what this version expects
        ├── MessageTooLargeError      a message exceeds what the ring or slot holds
        └── IpcTimeoutError (TimeoutError)   a deadline passed

Owns the classes only. Messages are written where the facts are known: they carry the
numbers that a person needs, and what to do.
"""

from __future__ import annotations


class ShmLLMError(Exception):
    """Base of all errors raised by shmllm."""


class RequestError(ShmLLMError, ValueError):
    """A request that cannot be served as asked. Nothing was queued; the engine lives on."""


class EnginePausedError(RequestError):
    """The engine was told to finish what it has and to take nothing new meanwhile. The same
    request can be sent again when it goes on."""


class CallOrderError(RequestError, RuntimeError):
    """A call that has to follow another one, or must not. Nothing was done."""


class EngineStartError(ShmLLMError):
    """The engine process did not become ready.

    Attributes:
        remote_traceback: the engine's traceback text, empty when the cause is the user's
            input (an unknown model, too little memory) and the message says it all.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.remote_traceback}" if self.remote_traceback else message


class EngineDeadError(ShmLLMError):
    """The engine process is gone; requests in flight are lost.

    Attributes:
        exit_code: what the process exited with; None when a signal ended it or when the
            exit status could not be read.
        signal: number of the signal that ended it, or None.
        remote_traceback: the engine's last words, empty when it left none.
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
    """Something that the engine was asked to do raised an exception there. It lives on.

    Attributes:
        remote_traceback: the engine's traceback text.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.remote_traceback}" if self.remote_traceback else message


class IpcError(ShmLLMError):
    """Something about shared memory."""


class SegmentError(IpcError):
    """A segment cannot be created, attached or used."""


class NoSpaceError(IpcError):
    """The file system that backs shared memory is full. Says what was needed and what is free."""


class ProtocolMismatchError(IpcError):
    """Bytes that this version of the protocol does not allow."""


class MessageTooLargeError(IpcError):
    """A message larger than its ring or slot can hold. Says both sizes."""


class IpcTimeoutError(IpcError, TimeoutError):
    """A wait that reached its deadline."""


REFUSALS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (RequestError, EnginePausedError, CallOrderError)
}
"""What an engine refuses with, by the name that travels."""
