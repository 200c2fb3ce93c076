from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shmllm.ipc.sched_batch import sleep_politely
from shmllm.ipc.wait import WaitPolicy

NO_PRIORITY = os.sched_param(0)


@pytest.fixture(autouse=True)
def usual_policy() -> Iterator[None]:
    yield
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_only_the_sleep_has_the_other_policy() -> None:
    seen: list[tuple[int, float]] = []

    def sleep(timeout_s: float) -> bool:
        seen.append((os.sched_getscheduler(0), timeout_s))
        return True

    assert sleep_politely(sleep, 0.5)
    assert seen == [(os.SCHED_BATCH, 0.5)]


def test_what_a_signal_handler_raises_ends_it() -> None:
    def sleep(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sleep_politely(sleep, 1)


def test_a_policy_that_the_caller_chose_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, NO_PRIORITY)
    try:
        assert not sleep_politely(lambda timeout_s: False, 1)
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, NO_PRIORITY)


def test_where_it_is_forbidden_the_sleep_is_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert sleep_politely(lambda timeout_s: True, 1)


@pytest.mark.parametrize(
    ("name", "threads", "is_polite"),
    [("balanced", 2, True), ("idle", 2, True), ("latency", 2, False), ("balanced", 1, False)],
)
def test_it_is_for_front_ends_without_a_core_of_their_own(
    name: str, threads: int, is_polite: bool
) -> None:
    assert WaitPolicy.for_machine(name, threads, cores=2).is_polite == is_polite
    assert not WaitPolicy.named(name).is_polite
