from __future__ import annotations

from collections.abc import Callable

import pytest

from shmllm.ipc import wait as module
from shmllm.ipc.layout import Parked
from shmllm.ipc.wait import (
    Waiter,
    WaitPolicy,
    ring_if_parked,
    ring_if_parked_for_any,
    ring_if_parked_for_room,
)

PARK_AT_ONCE = WaitPolicy(0, 0, 0.1, 0.25)


class Scene:
    """A doorbell, a parked word, a fence and `ready`, all of which keep a common diary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.diary: list[str] = []
        self.caps: list[float] = []
        self.value = 0
        self.answers: list[bool] = []
        self.on_wait: Callable[[], None] = lambda: None
        monkeypatch.setattr(module, "fence", lambda: self.diary.append("fence"))

    def load(self) -> int:
        self.diary.append("load parked")
        return self.value

    def store(self, value: int) -> None:
        self.diary.append(f"parked={value}")
        self.value = value

    def post(self) -> None:
        self.diary.append("post")

    def wait(self, timeout_s: float) -> bool:
        self.diary.append("wait")
        self.caps.append(timeout_s)
        self.on_wait()
        return False

    def drain(self) -> None:
        self.diary.append("drain")

    def ready(self) -> bool:
        self.diary.append("ready?")
        return self.answers.pop(0) if self.answers else False


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_what_is_ready_is_not_waited_for(scene: Scene) -> None:
    scene.answers = [True]
    assert Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert scene.diary == ["ready?"]


def test_the_parking_protocol_in_order(scene: Scene) -> None:
    assert not Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert scene.diary == [
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
    assert "wait" not in scene.diary
    assert scene.value == 0


def test_a_lost_post_costs_one_park_and_no_record(scene: Scene) -> None:
    scene.answers = [False, False, True]
    assert Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready)
    assert scene.diary.count("wait") == 1


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
    monkeypatch.setattr(module, "_sched_yield", lambda: scene.diary.append("yield"))
    Waiter(scene, scene, WaitPolicy(30, 30, 0.1, 0.25)).wait(scene.ready)
    steps = scene.diary
    assert steps.index("yield") == 3
    assert steps.count("yield") == 2
    assert max(i for i, step in enumerate(steps) if step == "yield") < steps.index("parked=1")


def test_a_record_that_comes_while_yielding_ends_the_wait(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_sched_yield", lambda: scene.answers.append(True))
    assert Waiter(scene, scene, WaitPolicy(0, 10**12, 0.1, 0.25)).wait(scene.ready)
    assert "parked=1" not in scene.diary


@pytest.mark.parametrize(("parked", "rings"), [(0, False), (1, True)])
def test_the_bell_is_rung_only_for_a_sleeper_and_after_the_fence(
    scene: Scene, parked: int, rings: bool
) -> None:
    scene.value = parked
    ring_if_parked(scene, scene)
    assert scene.diary == ["fence", "load parked"] + ["post"] * rings


@pytest.mark.parametrize(
    ("ring", "wakes"),
    [
        (ring_if_parked, {Parked.FOR_DATA, Parked.FOR_ROOM, Parked.FOR_URGENT}),
        (ring_if_parked_for_any, {Parked.FOR_DATA, Parked.FOR_ROOM}),
        (ring_if_parked_for_room, {Parked.FOR_ROOM}),
    ],
)
def test_a_sleeper_is_woken_for_what_it_waits_for(
    scene: Scene, ring: Callable[..., None], wakes: set[Parked]
) -> None:
    for reason in Parked:
        scene.diary.clear()
        scene.on_wait = lambda: ring(scene, scene)
        scene.value = Parked.NO
        if reason is not Parked.NO:
            Waiter(scene, scene, PARK_AT_ONCE).wait(scene.ready, reason=reason)
        else:
            ring(scene, scene)
        assert ("post" in scene.diary) == (reason in wakes)


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
        ("balanced", 2, 2, WaitPolicy(0, 0, 0.1, 0.25, is_polite=True)),
        ("balanced", 8, 2, WaitPolicy(0, 0, 0.1, 0.25, is_polite=True)),
        ("latency", 1, 2, WaitPolicy.named("latency")),
        ("latency", 2, 2, WaitPolicy.named("balanced")),
        ("idle", 2, 2, WaitPolicy(0, 0, 0.1, 0.25, is_polite=True)),
    ],
)
def test_no_spinning_on_the_cores_of_the_model(
    name: str, threads: int, cores: int, expected: WaitPolicy
) -> None:
    assert WaitPolicy.for_machine(name, threads, cores) == expected
