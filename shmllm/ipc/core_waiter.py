"""How an engine sleeps until any of its front ends wants something.

Owns the control segment's doorbell and the word that says whether to ring it. Must not know
what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from shmllm.ipc import layout
from shmllm.ipc.doorbell import open_doorbell_at
from shmllm.ipc.layout import Parked
from shmllm.ipc.segment import Segment
from shmllm.ipc.wait import Waiter, WaitPolicy
from shmllm.ipc.words import Word


class CoreWaiter:
    """How the engine sleeps: on the control segment's doorbell, for all clients at once.

    Args:
        control: the engine's own segment.
        policy: how to wait for requests; None for "balanced".
    """

    __slots__ = ("_doorbell", "_parked", "_waiter")

    def __init__(self, control: Segment, policy: WaitPolicy | None = None) -> None:
        policy = policy or WaitPolicy.named("balanced")
        memory = control.buffer
        self._parked = Word(memory, layout.CONTROL_PARKED_OFFSET)
        self._doorbell = open_doorbell_at(memory, layout.CONTROL_DOORBELL_OFFSET)
        self._waiter = Waiter(self._parked, self._doorbell, policy)

    def wait(self, ready: Callable[[], bool], busy: bool, for_room: bool = False) -> bool:
        """Wait once, up to the park cap; returns what `ready()` says at the end.

        Args:
            ready: any channel's `has_requests`, or a signal handler's flag.
            busy: whether anything is in flight; the cap is longer when not.
            for_room: whether outputs wait for room, which `ready` looks at, too.
        """
        if for_room:
            return self._waiter.wait(ready, reason=Parked.FOR_ROOM)
        return self._waiter.wait(ready) if busy else self._waiter.wait_idle(ready)

    def set_policy(self, policy: WaitPolicy) -> None:
        """Wait like this from now on."""
        self._waiter.set_policy(policy)

    @property
    def times_parked(self) -> int:
        """How often the engine slept."""
        return self._waiter.times_parked

    def wake(self) -> None:
        """End the present or the next park. Safe in a signal handler."""
        self._doorbell.post()

    def close(self) -> None:
        """Let go of the control segment; idempotent."""
        self._parked.close()
        self._doorbell.close()
