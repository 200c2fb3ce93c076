"""The words in a CLIENT segment that name another one, whose doorbell wakes the same front end.

A front end of several engines has a segment for each, and waits on the doorbell of one of them;
see `output_waiter`.
"""

from __future__ import annotations

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc import layout
from shmllm.ipc.segment import Segment
from shmllm.ipc.words import Word


def name_bell(client: Segment, bell: Segment, name: str) -> None:
    """Store that the front end of a segment waits on the doorbell of another segment.

    Args:
        client: the segment, which no engine has opened yet.
        bell: the other one.
        name: its name in the folder of both; empty if the engine inherits its descriptor.
    """
    encoded = name.encode("ascii")
    end = layout.CLIENT_BELL_NAME_OFFSET + len(encoded)
    client.buffer[layout.CLIENT_BELL_NAME_OFFSET : end] = encoded
    word = Word(client.buffer, layout.CLIENT_BELL_OFFSET)
    word.store(bell.nonce)
    word.close()


def bell_nonce(client: Segment) -> int:
    """Return the nonce of the segment whose doorbell wakes the front end of `client`."""
    word = Word(client.buffer, layout.CLIENT_BELL_OFFSET)
    nonce = word.load()
    word.close()
    return nonce or client.nonce


def bell_of(client: Segment) -> tuple[int, str] | None:
    """Return the nonce and the name of the segment whose doorbell wakes the front end; None: it is
    that of `client`.

    Raises:
        ProtocolMismatchError: the name is damaged.
    """
    nonce = bell_nonce(client)
    if nonce == client.nonce:
        return None
    begin = layout.CLIENT_BELL_NAME_OFFSET
    stored = bytes(client.buffer[begin : begin + layout.CLIENT_BELL_NAME_BYTES])
    try:
        return nonce, stored.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise ProtocolMismatchError(f"{stored!r} is no name of a segment") from error
