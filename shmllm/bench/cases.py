"""The cases of the transport benchmark (`shmllm bench ipc`), by name.

This module owns the cases' names, their sizes and the end that sends; it must not know how a
payload is encoded or transported.

    rtt-N                N bytes, front end to core
    add-N                a request with a prompt of N tokens, front end to core
    outputs-N            one token for each of N requests, core to front end
    outputs-N-logprobs   the same with the five most likely tokens of each and their logprobs

The benchmark times every case as a round trip: the payload one way, eight bytes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

KIB = 1024
MIB = 1024 * KIB
TOP_LOGPROBS = 5
WINDOW_BYTES = 128 * KIB
MOST_IN_WINDOW = 128
COPIED_UP_TO_BYTES = 64 * KIB


class Payload(Enum):
    """The kind of a case's messages."""

    BYTES = "rtt"
    ADD = "add"
    OUTPUTS = "outputs"


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        payload: the kind of its messages.
        size: bytes, prompt tokens or requests in a message, depending on `payload`.
        logprobs: whether OUTPUTS messages hold logprob columns.
    """

    payload: Payload
    size: int
    logprobs: bool = False

    @property
    def name(self) -> str:
        return f"{self.payload.value}-{self.size}{'-logprobs' if self.logprobs else ''}"

    @property
    def is_sent_by_core(self) -> bool:
        return self.payload is Payload.OUTPUTS

    @property
    def is_large(self) -> bool:
        """Whether the receiver reads the bytes in place instead of from a copy."""
        return self.payload is Payload.BYTES and self.size > COPIED_UP_TO_BYTES

    @property
    def window(self) -> int:
        """The number of messages per acknowledgement in a throughput measurement."""
        return max(1, min(MOST_IN_WINDOW, WINDOW_BYTES // self.size))


CASES = {
    case.name: case
    for case in (
        *(Case(Payload.BYTES, size) for size in (64, 512, 4 * KIB, 64 * KIB, MIB, 16 * MIB)),
        *(Case(Payload.ADD, size) for size in (512, 8192)),
        *(Case(Payload.OUTPUTS, size) for size in (1, 32, 256, 1024)),
        *(Case(Payload.OUTPUTS, size, logprobs=True) for size in (1, 32, 256, 1024)),
    )
}


def select(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Selects names by glob patterns.

    Args:
        patterns: such as `rtt-*`; an empty sequence selects every name.
        names: the names to choose from.

    Returns:
        The names that match at least one pattern, in the order of `names`.

    Raises:
        ValueError: a pattern matches no name.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"nothing is called {pattern!r}; there are {', '.join(names)}")
    return [
        name
        for name in names
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
