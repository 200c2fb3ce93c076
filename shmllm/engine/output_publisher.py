"""What the engine says to its front ends.

Owns how outputs, refusals and news become records, and that nothing of a front end is
scheduled while its records find no room. Must not know what the front ends asked.
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
        sessions: of the front ends, by place.

    Attributes:
        core: of the engine, once it is loaded.
    """

    def __init__(self, sessions: Mapping[int, Session]) -> None:
        self._sessions = sessions
        self.core: EngineCore | None = None

    def send(
        self, session: Session, kind: RecordKind, parts: codec.Parts, is_urgent: bool = True
    ) -> None:
        """Publish now, or as soon as there is room."""
        session.send(kind, parts, is_urgent)
        if session.is_stuck and self.core is not None:
            self.core.scheduler.pause_client(session.place)

    def publish(self, place: int, columns: OutputColumns) -> None:
        """A step's outputs, unless the front end is gone."""
        if (session := self._sessions.get(place)) is None:
            return
        columns.time_ns = time.monotonic_ns()
        is_urgent = any(columns.finishes)
        for kind, parts in codec.encode_step(columns):
            self.send(session, kind, parts, is_urgent)

    def reject(self, place: int, rejected: Rejected) -> None:
        """A request that is not served."""
        if (session := self._sessions.get(place)) is not None:
            self.send(session, RecordKind.REJECTED, codec.encode_rejected(rejected))

    def publish_news(self, core: EngineCore) -> None:
        """What a call did to requests and weights, in this order: those that it ended had the
        weights before."""
        for place, columns in core.take_outputs():
            self.publish(place, columns)
        if (version := core.weights.take_news()) is not None:
            for session in self._sessions.values():
                self.send_version(session, version)

    def send_version(self, session: Session, version: int | str) -> None:
        """The version of the weights that outputs are of from here on."""
        record = codec.encode_weight_version(WeightVersion(version))
        self.send(session, RecordKind.WEIGHT_VERSION, record)
