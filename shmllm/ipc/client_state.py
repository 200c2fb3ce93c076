"""Tells from a front end's segment whether the front end is idle, active, hung or stopped.

Every process that may read the segment can ask; the front end does not notice. This module must
not know how the answer is shown.
"""

from __future__ import annotations

import time
from contextlib import closing

from shmllm.ipc import layout
from shmllm.ipc.layout import OUTPUT_RING_LAYOUT, REQUEST_RING_LAYOUT
from shmllm.ipc.liveness import is_stopped
from shmllm.ipc.ring_state import peek
from shmllm.ipc.segment import Segment, pid_namespace
from shmllm.ipc.words import Word

ACTIVE_FOR_S = 1.0
"""A front end that waits for outputs beats at least ten times a second."""
HUNG_AFTER_S = 5.0


def client_state(client: Segment) -> str:
    """The state of a front end in words.

    - "stopped": the kernel has stopped its process, for example after SIGSTOP.
    - "hung 7 s": urgent outputs lie unread, and it has neither sent nor read nor waited for 7 s.
    - "active": it has sent, read or waited within the last second, or urgent outputs or requests
      lie unread.
    - "idle": nobody uses it. Outputs that are not urgent may lie unread: the engine sends some that
      the front end has not asked for, and those of a request that continues.

    Args:
        client: the front end's segment.
    """
    with closing(Word(client.buffer, layout.CLIENT_HEARTBEAT_OFFSET)) as heartbeat:
        beat_ns = heartbeat.load()
    with closing(Word(client.buffer, layout.OUTPUT_URGENT_OFFSET)) as urgent:
        has_outputs = urgent.load() > peek(client.buffer, OUTPUT_RING_LAYOUT, 0).consumed
    has_requests = peek(client.buffer, REQUEST_RING_LAYOUT, 0).used_bytes > 0
    silent_s = (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else None
    if _is_stopped(client):
        return "stopped"
    if has_outputs and silent_s is not None and silent_s >= HUNG_AFTER_S:
        return f"hung {silent_s:.0f} s"
    if has_outputs or has_requests or (silent_s is not None and silent_s < ACTIVE_FOR_S):
        return "active"
    return "idle"


def _is_stopped(client: Segment) -> bool:
    """Whether the front end's process is stopped. False if its pid has no meaning here."""
    if client.creator_pid_namespace != pid_namespace():
        return False
    return is_stopped(client.creator_pid)
