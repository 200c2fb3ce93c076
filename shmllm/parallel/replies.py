"""What a rank answers to a command: the result, or the error as text.

Results are pickled, errors are not: the constructor of an exception may take other arguments than
the pickle has, or its class may be known to one process only.
"""

from __future__ import annotations

import pickle
from traceback import TracebackException
from typing import Any, NamedTuple

from shmllm import errors


class Failure(NamedTuple):
    """An error of another process.

    name: the name of its class.
    text: its message.
    trace: the traceback, which ends with both.
    """

    name: str
    text: str
    trace: str

    @classmethod
    def of(cls, problem: Exception) -> Failure:
        """Describe an error of this process. An exception that has no text is described too."""
        found = TracebackException.from_exception(problem)
        return cls(type(problem).__name__, str(found), "".join(found.format()))

    def error_of(self, rank: int) -> Exception:
        """Return what rank 0 raises: an error of shmllm as the same class, without the traceback,
        and any other one as a RuntimeError.

        Args:
            rank: where it was raised.
        """
        kind = getattr(errors, self.name, None)
        if isinstance(kind, type) and issubclass(kind, errors.ShmLLMError):
            return kind(f"rank {rank}: {self.text}")
        return RuntimeError(f"rank {rank}: {self.name}: {self.text}\n{self.trace}")


def pack_result(value: Any) -> bytes:
    """Return a result as bytes. Raises what `pickle.dumps` raises."""
    return pickle.dumps((value, None))


def pack_failure(problem: Exception) -> bytes:
    """Return an error as bytes."""
    return pickle.dumps((None, Failure.of(problem)))


def unpack(data: bytes) -> tuple[Any, Failure | None]:
    """Return the result and None, or None and what was raised instead."""
    value, failure = pickle.loads(data)
    return value, failure
