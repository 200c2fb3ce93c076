"""The values of words in segments that are states or kinds; `layout` says where the words are."""

from __future__ import annotations

from enum import IntEnum


class SegmentKind(IntEnum):
    """The kind of a segment, stored in its header."""

    CONTROL = 1
    CLIENT = 2


class EngineState(IntEnum):
    """The state of an engine. An engine can only go from a lower to a higher state."""

    STARTING = 0
    READY = 1
    SHUTTING_DOWN = 2
    FAILED = 3
    DEAD = 4


class ClientState(IntEnum):
    """The state of a front end's connection, stored by the front end."""

    CONNECTED = 0
    CLOSING = 1


class Parked(IntEnum):
    """The event for which a parked (or almost parked) process wants to be woken."""

    NO = 0
    FOR_DATA = 1
    FOR_ROOM = 2
    FOR_URGENT = 3


class Answer(IntEnum):
    """What the engine says to the front end whose nonce is in the same CONTROL_ANSWER word.
    Nonces are multiples of NONCE_STEP, so every value is less than that."""

    ACCEPTED = 0
    NOT_CONNECTED = 1
    TOO_SLOW = 2
    BROKEN_PROTOCOL = 3
    NOT_USABLE = 4


class DoorbellKind(IntEnum):
    """The implementation of a doorbell, stored in its first word."""

    FUTEX = 1
    NAMED = 2
