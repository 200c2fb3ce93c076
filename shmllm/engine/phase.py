"""What an engine process is about to do: serve, finish, or end."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """
    RUNNING   -> DRAINING   a SHUTDOWN message with time to drain: no new requests
    RUNNING   -> STOPPING   a first signal, or the private engine's front end is gone
    DRAINING  -> STOPPING   all requests are done, or the time is over
    STOPPING                what runs is aborted and the process ends
    """

    RUNNING = auto()
    DRAINING = auto()
    STOPPING = auto()
