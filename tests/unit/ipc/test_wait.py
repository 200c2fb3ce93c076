from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from shmllm.ipc import wait as module
from shmllm.ipc.states import Parked
from shmllm.ipc.wait import (
    Waiter,
    WaitPolicy,
    sleep_under_sched_batch,
    wake_if_parked,
    wake_if_parked_for_any,
    wake_if_parked_for_room,
)

PARK_AT_ONCE = WaitPolicy(0, 0, 0.1, 0.25)


class Scene:
    """A fake doorbell, parked word, fence and `ready`, which record their calls in one list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.caps: list[float] = []
        self.value = 0
        self.answers: list[bool] = []
        self.on_wait: Callable[[], None] = lambda: None
        monkeypatch.setattr(module, "fence", lambda: self.calls.append("fence"))

    def load(self) -> int:
        self.calls.append("load parked")
        return self.value

    def store(self, value: int) -> None:
        self.calls.append(f"parked={value}")
        self.value = value

    def post(self) -> None:
        self.calls.append("post")

    def wait(self, timeout_s: float) -> bool:
        self.calls.append("wait")
        self.caps.append(timeout_s)
        self.on_wait()
        return False

    def drain(self) -> None:
        self.calls.append("drain")

    def ready(self) -> bool:
        self.calls.append("ready?")
        return self.answers.pop(0) if self.answers else False


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_condition_that_is_true_ends_the_wait_at_once(scene: Scene) -> None:
    scene.answers = [True]
    assert Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert scene.calls == ["ready?"]


def test_the_parking_protocol_in_order(scene: Scene) -> None:
    assert not Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert scene.calls == [
        "ready?",
        "parked=1",
        "fence",
        "ready?",
        "wait",
        "parked=0",
        "drain",
        "ready?",
    ]


def test_a_record_that_came_while_parking_is_seen_without_sleeping(scene: Scene) -> None:
    scene.answers = [False, True]
    assert Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert "wait" not in scene.calls
    assert scene.value == 0


def test_a_lost_post_costs_one_park_but_loses_no_record(scene: Scene) -> None:
    scene.answers = [False, False, True]
    assert Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert scene.calls.count("wait") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_parked_is_cleared_when_the_wait_raises(scene: Scene, error: type[BaseException]) -> None:
    def interrupt() -> None:
        raise error

    scene.on_wait = interrupt
    with pytest.raises(error):
        Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert scene.value == 0


def test_every_park_is_capped(scene: Scene) -> None:
    waiter = Waiter(scene, scene, PARK_AT_ONCE)
    waiter.wait(scene.ready)
    waiter.wait_idle(scene.ready)
    waiter.wait(scene.ready, 0.02)
    assert scene.caps == [0.1, 0.25, 0.02]
    waiter.wait(scene.ready, 0)
    assert len(scene.caps) == 3


def test_spinning_comes_before_yielding_before_parking(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(module, "_now_ns", lambda: next(now))
    monkeypatch.setattr(module, "_sched_yield", lambda: scene.calls.append("yield"))
    Waiter(scene, scene, WaitPolicy(30, 30, 0.1, 0.25)).wait(scene.ready)
    steps = scene.calls
    assert steps.index("yield") == 3
    assert steps.count("yield") == 3
    assert max(i for i, step in enumerate(steps) if step == "yield") < steps.index("parked=1")


def test_a_record_that_comes_while_yielding_ends_the_wait(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_sched_yield", lambda: scene.answers.append(True))
    assert Waiter(scene, scene, WaitPolicy(0, 10**12, 0.1, 0.25)).wait(scene.ready)
    assert "parked=1" not in scene.calls


@pytest.mark.parametrize(("parked", "rings"), [(0, False), (1, True)])
def test_the_doorbell_is_posted_only_for_a_parked_peer_and_after_the_fence(
    scene: Scene, parked: int, rings: bool
) -> None:
    scene.value = parked
    wake_if_parked(scene, scene)
    assert scene.calls == ["fence", "load parked"] + ["post"] * rings


@pytest.mark.parametrize(
    ("ring", "wakes"),
    [
        (wake_if_parked, {Parked.FOR_DATA, Parked.FOR_ROOM, Parked.FOR_URGENT}),
        (wake_if_parked_for_any, {Parked.FOR_DATA, Parked.FOR_ROOM}),
        (wake_if_parked_for_room, {Parked.FOR_ROOM}),
    ],
)
def test_a_parked_peer_is_woken_only_for_its_reason(
    scene: Scene, ring: Callable[..., None], wakes: set[Parked]
) -> None:
    for reason in Parked:
        scene.calls.clear()
        scene.on_wait = lambda: ring(scene, scene)
        scene.value = Parked.NO
        if reason is not Parked.NO:
            Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready, reason=reason)
        else:
            ring(scene, scene)
        assert ("post" in scene.calls) == (reason in wakes)


def test_policies_have_names() -> None:
    for name in ("latency", "balanced", "idle"):
        policy = WaitPolicy.named(name)
        assert 0 < policy.park_cap_s <= 0.1
        assert policy.park_cap_s <= policy.idle_park_cap_s <= 0.25
    assert WaitPolicy.named("idle").spin_ns == WaitPolicy.named("idle").yield_ns == 0
    with pytest.raises(ValueError, match="latency, balanced, idle"):
        WaitPolicy.named("fast")


@pytest.mark.parametrize(
    ("name", "threads", "cores", "expected"),
    [
        ("balanced", 1, 2, WaitPolicy.named("balanced")),
        ("balanced", 2, 2, WaitPolicy(0, 0, 0.1, 0.25, uses_sched_batch=True)),
        ("balanced", 8, 2, WaitPolicy(0, 0, 0.1, 0.25, uses_sched_batch=True)),
        ("latency", 1, 2, WaitPolicy.named("latency")),
        ("latency", 2, 2, WaitPolicy.named("balanced")),
        ("idle", 2, 2, WaitPolicy(0, 0, 0.1, 0.25, uses_sched_batch=True)),
    ],
)
def test_a_policy_does_not_poll_on_the_cores_of_the_model(
    name: str, threads: int, cores: int, expected: WaitPolicy
) -> None:
    assert WaitPolicy.for_machine(name, threads, cores) == expected


@pytest.fixture(autouse=True)
def scheduling_policy_is_restored() -> Iterator[None]:
    yield
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_only_the_sleep_runs_under_sched_batch() -> None:
    seen: list[tuple[int, float]] = []

    def sleep(timeout_s: float) -> bool:
        seen.append((os.sched_getscheduler(0), timeout_s))
        return True

    assert sleep_under_sched_batch(sleep, 0.5)
    assert seen == [(os.SCHED_BATCH, 0.5)]


def test_an_exception_of_a_signal_handler_ends_the_sleep() -> None:
    def sleep(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sleep_under_sched_batch(sleep, 1)


def test_a_scheduling_policy_that_the_caller_chose_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        assert not sleep_under_sched_batch(lambda timeout_s: False, 1)
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_if_sched_batch_is_forbidden_the_sleep_keeps_the_usual_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert sleep_under_sched_batch(lambda timeout_s: True, 1)


@pytest.mark.parametrize(
    ("name", "threads", "uses_sched_batch"),
    [("balanced", 2, True), ("idle", 2, True), ("latency", 2, False), ("balanced", 1, False)],
)
def test_sched_batch_is_for_front_ends_without_a_core_of_their_own(
    name: str, threads: int, uses_sched_batch: bool
) -> None:
    assert WaitPolicy.for_machine(name, threads, cores=2).uses_sched_batch == uses_sched_batch
    assert not WaitPolicy.named(name).uses_sched_batch


class Core:
    """A clock that moves 1 us at each look and more at each `sched_yield`, and a count of switches.

    Attributes:
        yields_ns: how long the next yields take; the last one counts for all that follow.
        switches: whether a long yield is a switch to another thread, and not time that a hypervisor
            took.
        num_yields: the number of yields so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.yields_ns = [1_000]
        self.switches = True
        self.num_yields = self.num_switches = 0
        monkeypatch.setattr(module, "_now_ns", self.look)
        monkeypatch.setattr(module, "_sched_yield", self.sched_yield)
        monkeypatch.setattr(module.resource, "getrusage", self.usage)

    def look(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def sched_yield(self) -> None:
        self.num_yields += 1
        yield_ns = self.yields_ns.pop(0) if len(self.yields_ns) > 1 else self.yields_ns[0]
        self.now_ns += yield_ns
        self.num_switches += self.switches and yield_ns > 100_000

    def usage(self, who: int) -> SimpleNamespace:
        assert who == resource.RUSAGE_THREAD
        return SimpleNamespace(ru_nivcsw=self.num_switches)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


@pytest.fixture
def waiter(scene: Scene) -> Waiter:
    return Waiter(scene, scene, WaitPolicy.named("latency"))  # type: ignore[arg-type]


def test_polling_pauses_while_the_core_has_other_work(
    scene: Scene, core: Core, waiter: Waiter
) -> None:
    waiter.wait(scene.ready)
    assert core.num_yields > 100  # alone on its core: it polls for 2 ms
    core.yields_ns = [4_000_000]
    core.num_yields = 0
    for _ in range(3):
        waiter.wait(scene.ready)
        assert core.num_yields == 2, "it parks at once after two yields that others used"
    pauses = []
    for pause in range(8):
        began_ns = core.now_ns
        while core.num_yields == 2 * pause + 2:
            core.now_ns += 10_000_000
            waiter.wait(scene.ready)
        pauses.append(round((core.now_ns - began_ns) / 1e8))
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[2] < pauses[-1] <= 33
    core.yields_ns = [1_000]
    core.now_ns += 4_000_000_000
    core.num_yields = 0
    waiter.wait(scene.ready)
    assert core.num_yields > 100, "the core is free again"


@pytest.mark.parametrize("is_hypervisor", [False, True])
def test_a_short_task_or_a_hypervisor_ends_no_polling(
    scene: Scene, core: Core, waiter: Waiter, is_hypervisor: bool
) -> None:
    core.switches = not is_hypervisor
    for _ in range(10):
        core.num_yields = 0
        core.yields_ns = [4_000_000] * (1 + is_hypervisor) + [1_000]
        waiter.wait(scene.ready)
        waiter.wait(scene.ready)
        assert core.num_yields > 100


def test_a_poll_that_succeeds_makes_the_next_pause_short(
    scene: Scene, core: Core, waiter: Waiter
) -> None:
    lengths = []
    for succeeds in (False, True):
        core.now_ns += 4_000_000_000
        core.yields_ns = [4_000_000]
        for _ in range(6):
            waiter.wait(scene.ready)
            core.now_ns = max(core.now_ns, waiter._paused_until_ns)
        if succeeds:
            core.yields_ns = [1_000]
            scene.answers = [False] * 50 + [True]
            assert waiter.wait(scene.ready)
        core.yields_ns = [4_000_000]
        waiter.wait(scene.ready)
        lengths.append(waiter._paused_until_ns - core.now_ns)
    assert lengths[1] < lengths[0] / 10
