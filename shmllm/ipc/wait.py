"""Waiting for another process: spin, then yield, then park (sleep) on a doorbell with a time limit.

This module owns the wait policies and the parking protocol. It must not know the condition that
the caller waits for. The caller passes it as `ready()`, which reads shared memory, and the result
of a wait depends on nothing else. A doorbell is only a hint, so a lost post costs at most one
park and never loses a record.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shmllm.ipc.doorbell import Doorbell
from shmllm.ipc.states import Parked
from shmllm.ipc.words import PlainWord, fence

_now_ns = time.perf_counter_ns
_sched_yield = os.sched_yield
_NO_PRIORITY = os.sched_param(0)
_OTHERS_RAN_NS = 200_000
"""A `sched_yield` that takes longer may have given the core to a thread that had work."""
_FIRST_PAUSE_NS = 100_000_000
_LONGEST_PAUSE_NS = 3_200_000_000


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How long a wait polls before it parks, and how long one park may last.

    Attributes:
        spin_ns: the time of polling without a pause, which comes first.
        yield_ns: the time of polling with `sched_yield` between the loads, which comes next. It
            lets a peer on the same core run.
        park_cap_s: the longest park while requests are in flight.
        idle_park_cap_s: the longest park while no request is in flight.
        uses_sched_batch: park under SCHED_BATCH, so that the wake-up preempts no computing
            thread; see `sleep_under_sched_batch`.
    """

    spin_ns: int
    yield_ns: int
    park_cap_s: float
    idle_park_cap_s: float
    uses_sched_batch: bool = False

    @staticmethod
    def named(name: str) -> WaitPolicy:
        """The policy "latency", "balanced" or "idle".

        Raises:
            ValueError: no policy has this name.
        """
        if name not in _POLICIES:
            raise ValueError(f"no wait policy {name!r}; there are {', '.join(_POLICIES)}")
        return _POLICIES[name]

    @staticmethod
    def for_machine(name: str, compute_threads: int, cores: int) -> WaitPolicy:
        """The named policy, changed if polling would take a core from the model.

        Args:
            name: the name of a policy, as for `named`.
            compute_threads: the number of the engine's CPU threads that compute (0 or 1 with a
                GPU).
            cores: the number of cores on which the processes may run.

        Returns:
            The named policy if a core is left beside the computing threads. Otherwise "balanced"
            instead of "latency", and instead of the others a policy that parks at once and under
            SCHED_BATCH.
        """
        policy = WaitPolicy.named(name)
        if compute_threads < cores:
            return policy
        if name == "latency":
            return _POLICIES["balanced"]
        return replace(policy, spin_ns=0, yield_ns=0, uses_sched_batch=True)


_POLICIES = {
    "latency": WaitPolicy(5_000, 2_000_000, 0.1, 0.25),
    "balanced": WaitPolicy(5_000, 45_000, 0.1, 0.25),
    "idle": WaitPolicy(0, 0, 0.1, 0.25),
}


def sleep_under_sched_batch(sleep: Callable[[float], bool], timeout_s: float) -> bool:
    """Call `sleep(timeout_s)` under SCHED_BATCH, so that the wake-up preempts no other thread.

    In Linux a thread that wakes up preempts the thread that runs on its core. A model step whose
    threads wait for each other is then as slow as the preempted thread. A thread under SCHED_BATCH
    waits for a free core, or for the end of a time slice. A process may enter and leave this policy
    without privileges, but not lower its nice value again; therefore the sleep alone uses the
    policy, and the caller's code before and after it runs as usual. (A niced thread would also
    delay the other threads of its process that wait for the GIL.)
    """
    is_usual = False
    try:
        try:
            is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER
            if is_usual:
                os.sched_setscheduler(0, os.SCHED_BATCH, _NO_PRIORITY)
        except OSError:  # a sandbox forbids the call
            is_usual = False
        return sleep(timeout_s)
    finally:
        if is_usual:
            os.sched_setscheduler(0, os.SCHED_OTHER, _NO_PRIORITY)


def _others_want_this_core() -> bool:
    """Whether a `sched_yield` hands this core to another thread for long.

    A long yield alone shows less: a hypervisor that took the core, or one short task. In both cases
    the next yield is short, or this thread was not switched out.
    """
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    began_ns = _now_ns()
    _sched_yield()
    if _now_ns() - began_ns <= _OTHERS_RAN_NS:
        return False
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw > before


class Waiter:
    """The waiting side of a doorbell; each process has one for each doorbell that it waits on.

    Args:
        parked: the word that tells peers to post the doorbell; only this process writes it.
        doorbell: the doorbell that peers post.
        policy: the wait policy.
        on_park: called before each park, for work that is not urgent.

    Attributes:
        times_parked: the number of parks.
    """

    __slots__ = (
        "_doorbell",
        "_on_park",
        "_parked",
        "_pause_ns",
        "_paused_until_ns",
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
        self._pause_ns = _FIRST_PAUSE_NS
        self._paused_until_ns = 0
        self.set_policy(policy)

    def set_policy(self, policy: WaitPolicy) -> None:
        """Use another wait policy from now on."""
        self._policy = policy
        self._spin_ns = policy.spin_ns
        self._yield_ns = policy.yield_ns

    @property
    def park_cap_s(self) -> float:
        """The longest park while requests are in flight."""
        return self._policy.park_cap_s

    def wait(
        self,
        ready: Callable[[], bool],
        cap_s: float | None = None,
        reason: Parked = Parked.FOR_DATA,
    ) -> bool:
        """Spin, yield and park once, until `ready()` is true.

        Args:
            ready: the condition, read from shared memory; called often, so it must be cheap.
            cap_s: the longest park; None for the policy's `park_cap_s`.
            reason: the event for which a peer must post the doorbell.

        Returns:
            The last result of `ready()`.
        """
        if ready() or self._poll(ready):
            return True
        cap_s = self._policy.park_cap_s if cap_s is None else cap_s
        return self._park(ready, cap_s, reason)

    def wait_idle(self, ready: Callable[[], bool]) -> bool:
        """The same as `wait`, with the longer park cap for the time without requests."""
        return self.wait(ready, self._policy.idle_park_cap_s)

    def _poll(self, ready: Callable[[], bool]) -> bool:
        if not (self._spin_ns or self._yield_ns):
            return False
        now_ns = _now_ns()
        if now_ns < self._paused_until_ns:
            return False
        spin_end_ns = now_ns + self._spin_ns
        while (now_ns := _now_ns()) < spin_end_ns:
            if ready():
                return True
        yield_end_ns = spin_end_ns + self._yield_ns
        while now_ns < yield_end_ns:
            _sched_yield()
            began_ns, now_ns = now_ns, _now_ns()
            if now_ns - began_ns > _OTHERS_RAN_NS and _others_want_this_core():
                self._pause_polling()
                return ready()
            if ready():
                self._pause_ns = _FIRST_PAUSE_NS
                return True
        return False

    def _pause_polling(self) -> None:
        """Park without polling for a while, because this core has other work.

        A `sched_yield` then lasts whole time slices of the others, and the peer may need this core,
        while the wake-up from a park preempts them. The pause doubles each time, until polling
        succeeds.
        """
        self._paused_until_ns = _now_ns() + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _LONGEST_PAUSE_NS)

    def _park(self, ready: Callable[[], bool], cap_s: float, reason: Parked) -> bool:
        if cap_s <= 0:
            return ready()
        self.times_parked += 1
        if self._on_park is not None:
            self._on_park()
        # SYNC POINT: parked against published. Both sides store, fence, and then load the other
        # side's word. Without either fence both may load the old value, and this process sleeps
        # while the ring has a record.
        self._parked.store(reason)
        try:
            fence()
            if ready():
                return True
            if self._policy.uses_sched_batch:
                sleep_under_sched_batch(self._doorbell.wait, cap_s)
            else:
                self._doorbell.wait(cap_s)
        finally:
            self._parked.store(Parked.NO)
            # Remaining posts would cut the next park short. They are taken before the last call
            # of `ready`, so that call sees a record that came with one of them.
            self._doorbell.drain()
        return ready()


def wake_if_parked(parked: PlainWord, doorbell: Doorbell) -> None:
    """Post the doorbell if the peer is parked; the caller has just published a record."""
    # SYNC POINT: parked against published (see Waiter._park).
    fence()
    if parked.load():
        doorbell.post()


def wake_if_parked_for_any(parked: PlainWord, doorbell: Doorbell) -> None:
    """Post the doorbell if the peer is parked, unless it waits for urgent records only; the caller
    has just published a record that is not urgent."""
    # SYNC POINT: parked against published (see Waiter._park).
    fence()
    if parked.load() not in (Parked.NO, Parked.FOR_URGENT):
        doorbell.post()


def wake_if_parked_for_room(parked: PlainWord, doorbell: Doorbell) -> None:
    """Post the doorbell if the peer is parked to wait for room; the caller has just consumed
    records."""
    # SYNC POINT: parked against published (see Waiter._park).
    fence()
    if parked.load() == Parked.FOR_ROOM:
        doorbell.post()
