"""The wait of an engine for any of its front ends.

This module owns the control segment's doorbell and the word that tells front ends whether they
have to post it. It must not know the condition that the engine waits for.
"""

from __future__ import annotations

from collections.abc import Callable

from shmllm.ipc import layout
from shmllm.ipc.doorbell import Doorbell, open_shared_doorbell
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Parked
from shmllm.ipc.wait import Waiter, WaitPolicy
from shmllm.ipc.words import Word


def core_doorbell(control: Segment) -> Doorbell:
    """The doorbell of the engine with this control segment; the caller closes it."""
    area = control.part(layout.CONTROL_DOORBELL_OFFSET, layout.DOORBELL_BYTES)
    return open_shared_doorbell(area)


class CoreWaiter:
    """Waits on the control segment's doorbell, which all front ends post.

    Args:
        control: the engine's own control segment.
        policy: the wait policy; None for "balanced".
    """

    __slots__ = ("_doorbell", "_parked", "_waiter")

    def __init__(self, control: Segment, policy: WaitPolicy | None = None) -> None:
        policy = policy or WaitPolicy.named("balanced")
        self._parked = Word(control.buffer, layout.CONTROL_PARKED_OFFSET)
        self._doorbell = core_doorbell(control)
        self._waiter = Waiter(self._parked, self._doorbell, policy)

    def wait(self, ready: Callable[[], bool], busy: bool, for_room: bool = False) -> bool:
        """Wait until `ready()` is true, but at most for one park.

        Args:
            ready: the condition; for example whether any channel has requests, or a flag that a
                signal handler sets.
            busy: whether requests are in flight; if not, the longer idle park cap applies.
            for_room: whether outputs wait for room in an output ring. Then `ready` must check
                for that room too.

        Returns:
            The last result of `ready()`.
        """
        if for_room:
            return self._waiter.wait(ready, reason=Parked.FOR_ROOM)
        return self._waiter.wait(ready) if busy else self._waiter.wait_idle(ready)

    def set_policy(self, policy: WaitPolicy) -> None:
        """Use another wait policy from now on."""
        self._waiter.set_policy(policy)

    @property
    def times_parked(self) -> int:
        """The number of times that the engine has parked."""
        return self._waiter.times_parked

    def wake(self) -> None:
        """End the current park, or else the next one. A signal handler may call this."""
        self._doorbell.post()

    def close(self) -> None:
        """Release the views of the control segment; idempotent."""
        self._parked.close()
        self._doorbell.close()
