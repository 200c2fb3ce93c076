"""Publishes outputs, rejections and weight versions to front ends.

This module encodes them as records and stops scheduling a front end's requests while its output
ring has no room. It must not know what the front ends asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from shmllm.engine.core import EngineCore
from shmllm.engine.session import Session
from shmllm.outputs.columns import OutputColumns
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind, Rejected, WeightVersion


class OutputPublisher:
    """
    Args:
        sessions: the sessions of the front ends, by place.

    Attributes:
        core: the engine core, once it is loaded.
    """

    def __init__(self, sessions: Mapping[int, Session]) -> None:
        self._sessions = sessions
        self.core: EngineCore | None = None

    def send(
        self, session: Session, kind: RecordKind, parts: codec.Parts, is_urgent: bool = True
    ) -> None:
        """Publish a record now, or as soon as the ring has room."""
        session.send(kind, parts, is_urgent)
        if session.is_stuck and self.core is not None:
            self.core.scheduler.pause_client(session.place)

    def publish(self, place: int, columns: OutputColumns) -> None:
        """Publish a step's outputs, unless the front end has disconnected."""
        if (session := self._sessions.get(place)) is None:
            return
        columns.time_ns = time.monotonic_ns()
        is_urgent = any(columns.finishes)
        for kind, parts in codec.encode_step(columns):
            self.send(session, kind, parts, is_urgent)

    def reject(self, place: int, rejected: Rejected) -> None:
        """Publish that a request is not served."""
        if (session := self._sessions.get(place)) is not None:
            self.send(session, RecordKind.REJECTED, codec.encode_rejected(rejected))

    def publish_call_effects(self, core: EngineCore) -> None:
        """Publish the effects of a call: first the requests that it ended, whose tokens come from
        the previous weights, then the new weight version."""
        for place, columns in core.take_outputs():
            self.publish(place, columns)
        if (version := core.weights.take_new_version()) is not None:
            for session in self._sessions.values():
                self.send_version(session, version)

    def send_version(self, session: Session, version: int | str) -> None:
        """Publish the version of the weights that compute all later outputs."""
        record = codec.encode_weight_version(WeightVersion(version))
        self.send(session, RecordKind.WEIGHT_VERSION, record, is_urgent=False)
