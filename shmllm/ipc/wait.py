"""Waiting: spin, then yield, then park on a doorbell with a cap.

Owns the policy and the parking protocol. Must not know what is waited for: it is given
`ready()`, which reads shared memory, and believes nothing else. The memory is the truth
and the doorbell a hint, so a ring that never comes costs one capped park and no message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shmllm.ipc.doorbell import Doorbell
from shmllm.ipc.layout import Parked
from shmllm.ipc.sched_batch import sleep_politely
from shmllm.ipc.words import PlainWord, fence

_now_ns = time.perf_counter_ns
_sched_yield = os.sched_yield


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How long to burn CPU before sleeping, and how long one sleep may last.

    Attributes:
        spin_ns: bare loads first.
        yield_ns: then loads with `sched_yield` between them, so that a peer on the same
            core gets to run.
        park_cap_s: longest sleep while work is in flight.
        idle_park_cap_s: longest sleep when nothing is.
        is_polite: wake up without taking a core from whoever computes.
    """

    spin_ns: int
    yield_ns: int
    park_cap_s: float
    idle_park_cap_s: float
    is_polite: bool = False

    @staticmethod
    def named(name: str) -> WaitPolicy:
        """One of "latency", "balanced", "idle".

        Raises:
            ValueError: another name.
        """
        if name not in _POLICIES:
            raise ValueError(f"no wait policy {name!r}; there are {', '.join(_POLICIES)}")
        return _POLICIES[name]

    @staticmethod
    def for_machine(name: str, compute_threads: int, cores: int) -> WaitPolicy:
        """The named policy, toned down where spinning would take a core from the model.

        Args:
            name: as for `named`.
            compute_threads: CPU threads of the engine that compute (0 or 1 with a GPU).
            cores: that the processes may run on.

        Returns:
            With no core to spare "latency" spins no longer than "balanced" does; the others
            park at once, and wake up politely.
        """
        policy = WaitPolicy.named(name)
        if compute_threads < cores:
            return policy
        if name == "latency":
            return _POLICIES["balanced"]
        return replace(policy, spin_ns=0, yield_ns=0, is_polite=True)


_POLICIES = {
    "latency": WaitPolicy(5_000, 2_000_000, 0.1, 0.25),
    "balanced": WaitPolicy(5_000, 45_000, 0.1, 0.25),
    "idle": WaitPolicy(0, 0, 0.1, 0.25),
}


class Waiter:
    """The sleeping side of a doorbell; one per process and doorbell.

    Args:
        parked: the word that tells peers to ring; written by this process only.
        doorbell: what they ring.
        policy: how to wait.
        on_park: called before each sleep, when there is time to spare.

    Attributes:
        times_parked: how often it slept.
    """

    __slots__ = (
        "_doorbell",
        "_on_park",
        "_parked",
        "_policy",
        "_spin_ns",
        "_yield_ns",
        "times_parked",
    )

    def __init__(
        self,
        parked: PlainWord,
        doorbell: Doorbell,
        policy: WaitPolicy,
        on_park: Callable[[], None] | None = None,
    ) -> None:
        self._parked = parked
        self._doorbell = doorbell
        self._on_park = on_park
        self.times_parked = 0
        self.set_policy(policy)

    def set_policy(self, policy: WaitPolicy) -> None:
        """Wait like this from now on."""
        self._policy = policy
        self._spin_ns = policy.spin_ns
        self._yield_ns = policy.yield_ns

    @property
    def park_cap_s(self) -> float:
        """Longest sleep while work is in flight."""
        return self._policy.park_cap_s

    def wait(
        self,
        ready: Callable[[], bool],
        cap_s: float | None = None,
        reason: Parked = Parked.FOR_DATA,
    ) -> bool:
        """Spin, yield, then park once; returns what `ready()` says at the end.

        Args:
            ready: reads shared memory; called often, so make it cheap.
            cap_s: longest park, None for the policy's `park_cap_s`.
            reason: what the peer shall ring for.
        """
        if ready() or self._poll(ready):
            return True
        cap_s = self._policy.park_cap_s if cap_s is None else cap_s
        return self._park(ready, cap_s, reason)

    def wait_idle(self, ready: Callable[[], bool]) -> bool:
        """Like `wait`, with the longer cap for when nothing is in flight."""
        return self.wait(ready, self._policy.idle_park_cap_s)

    def _poll(self, ready: Callable[[], bool]) -> bool:
        if not (self._spin_ns or self._yield_ns):
            return False
        spin_end_ns = _now_ns() + self._spin_ns
        while _now_ns() < spin_end_ns:
            if ready():
                return True
        yield_end_ns = spin_end_ns + self._yield_ns
        while _now_ns() < yield_end_ns:
            _sched_yield()
            if ready():
                return True
        return False

    def _park(self, ready: Callable[[], bool], cap_s: float, reason: Parked) -> bool:
        if cap_s <= 0:
            return ready()
        self.times_parked += 1
        if self._on_park is not None:
            self._on_park()
        # SYNC POINT: parked against published. Both sides store, fence, then load the
        # other's word; without either fence both can load the old value, and this
        # process sleeps while a record waits.
        self._parked.store(reason)
        try:
            fence()
            if ready():
                return True
            if self._policy.is_polite:
                sleep_politely(self._doorbell.wait, cap_s)
            else:
                self._doorbell.wait(cap_s)
        finally:
            self._parked.store(Parked.NO)
            # Left-over posts would cut the next park short. They are taken before the last
            # look, so a record that came with one of them is not missed.
            self._doorbell.drain()
        return ready()


def ring_if_parked(parked: PlainWord, doorbell: Doorbell) -> None:
    """The waking side: call it after publishing."""
    # SYNC POINT: parked against published (see Waiter._park).
    fence()
    if parked.load():
        doorbell.post()


def ring_if_parked_for_any(parked: PlainWord, doorbell: Doorbell) -> None:
    """The waking side: call it after publishing what is not urgent."""
    # SYNC POINT: parked against published (see Waiter._park).
    fence()
    if parked.load() not in (Parked.NO, Parked.FOR_URGENT):
        doorbell.post()


def ring_if_parked_for_room(parked: PlainWord, doorbell: Doorbell) -> None:
    """The waking side: call it after consuming. Room wakes only who waits for it."""
    # SYNC POINT: parked against published (see Waiter._park).
    fence()
    if parked.load() == Parked.FOR_ROOM:
        doorbell.post()
