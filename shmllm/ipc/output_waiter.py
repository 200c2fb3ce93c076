"""The wait of a front end for outputs, of one engine or of several.

This module owns the doorbell that engines post and the word that tells them whether they have to.
They lie in a CLIENT segment. A front end of several engines uses those of one of its segments for
all of them, so that one wait ends with the first output of any engine. It must not know what an
output is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shmllm.ipc import layout
from shmllm.ipc.doorbell import open_doorbell
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Parked
from shmllm.ipc.wait import Waiter, WaitPolicy
from shmllm.ipc.words import Word

NON_URGENT_DELAY_S = 0.01
"""A front end that waits for an urgent output checks for other outputs this often, in seconds."""

Ready = Callable[[], bool]


class OutputWaiter:
    """
    Args:
        segment: the CLIENT segment with the word and the doorbell.
        policy: the wait policy.

    Attributes:
        segment: as given.
        on_park: called before each park.
    """

    def __init__(self, segment: Segment, policy: WaitPolicy) -> None:
        self.segment = segment
        self.on_park: list[Callable[[], None]] = []
        self._parked = Word(segment.buffer, layout.CLIENT_PARKED_OFFSET)
        area = segment.part(layout.CLIENT_DOORBELL_OFFSET, layout.DOORBELL_BYTES)
        self._doorbell = open_doorbell(area)
        self._waiter = Waiter(self._parked, self._doorbell, policy, self._before_park)
        self._last_urgent_wait_was_empty = False

    @property
    def times_parked(self) -> int:
        """The number of parks."""
        return self._waiter.times_parked

    def set_policy(self, policy: WaitPolicy) -> None:
        """Use another wait policy from now on."""
        self._waiter.set_policy(policy)

    def wait(
        self, has_data: Ready, has_urgent: Ready | None = None, deadline_s: float | None = None
    ) -> bool:
        """Wait until there is an unread output. The call parks at most once.

        Args:
            has_data: whether there is one.
            has_urgent: whether there is an urgent one: wait for that, but no longer than
                NON_URGENT_DELAY_S. If there is no output of any kind then, outputs come slowly, and
                the next call waits for any. None: wait for any.
            deadline_s: a time on `time.monotonic()`; None: only the park cap bounds the wait.

        Returns:
            The last result of `has_data()`.
        """
        cap_s = self._waiter.park_cap_s
        if deadline_s is not None:
            cap_s = min(deadline_s - time.monotonic(), cap_s)
        if cap_s <= 0:
            return has_data()
        if has_urgent is not None and not self._last_urgent_wait_was_empty:
            self._waiter.wait(has_urgent, min(cap_s, NON_URGENT_DELAY_S), Parked.FOR_URGENT)
            found = has_data()
            self._last_urgent_wait_was_empty = not found
            return found
        self._last_urgent_wait_was_empty = False
        return self._waiter.wait(has_data, cap_s)

    def wait_for_room(self, ready: Ready) -> bool:
        """Wait until the engine has made room, for at most one park. Returns `ready()`."""
        return self._waiter.wait(ready, reason=Parked.FOR_ROOM)

    def wake(self) -> None:
        """Wake the thread that waits here; if none waits, the next park ends at once."""
        self._doorbell.post()

    def close(self) -> None:
        """Release the views of the segment; idempotent."""
        self._parked.close()
        self._doorbell.close()

    def _before_park(self) -> None:
        for call in self.on_park:
            call()
