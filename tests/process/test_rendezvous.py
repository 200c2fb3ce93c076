"""Trainer and engines find each other through a store, or say in time why not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from shmllm.errors import RequestError
from shmllm.transfer.group import Group
from shmllm.transfer.rendezvous import (
    announce,
    gather,
    is_gone,
    join_store,
    own_address,
    say_gone,
    serve_store,
)
from shmllm.transfer.trainer_info import NCCLWeightTransferInitInfo

pytestmark = pytest.mark.process


@pytest.fixture
def store() -> Any:
    return serve_store("127.0.0.1", 0, 10)


def later(store: Any, num_workers: int, answers: list[Any]) -> threading.Thread:
    """An engine that announces itself."""

    def run() -> None:
        engine = join_store("127.0.0.1", store.port, 10)
        try:
            answers.append(announce(engine, num_workers, time.monotonic() + 10))
        except RequestError as problem:
            answers.append(str(problem))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_each_engine_gets_a_rank_of_its_own(store: Any) -> None:
    answers: list[Any] = []
    engines = [later(store, workers, answers) for workers in (2, 1, 4)]
    assert gather(store, 7, time.monotonic() + 10, lambda: None) == 4
    for engine in engines:
        engine.join(10)
    assert sorted(answers) == [(1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize(("num_workers", "wait_s"), [(1, 10.0), (3, 0.2)])
def test_a_wrong_number_of_workers_is_an_error_of_both(
    store: Any, num_workers: int, wait_s: float
) -> None:
    answers: list[Any] = []
    engine = later(store, 2, answers)
    while not store.check(["workers/1"]):
        time.sleep(0.001)
    with pytest.raises(RequestError, match="engines with 2 workers") as caught:
        gather(store, num_workers, time.monotonic() + wait_s, lambda: None)
    engine.join(10)
    assert answers == [str(caught.value)]


def test_an_engine_that_failed_ends_the_wait(store: Any) -> None:
    def look() -> None:
        raise RequestError("it is busy")

    with pytest.raises(RequestError, match="it is busy"):
        gather(store, 1, time.monotonic() + 10, look)


def test_a_trainer_that_does_not_answer_is_an_error_in_time(store: Any) -> None:
    with pytest.raises(RequestError, match="waits for other engines"):
        announce(store, 1, time.monotonic() + 0.05)
    with pytest.raises(RequestError, match=r"cannot listen on 127\.0\.0\.1"):
        serve_store("127.0.0.1", store.port, 1)


def test_this_host_is_reached_by_loopback() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("localhost", 1) in ("127.0.0.1", "::1")


def test_a_group_that_others_do_not_join_is_an_error_in_time(store: Any) -> None:
    info = NCCLWeightTransferInitInfo(
        master_address="127.0.0.1", master_port=store.port, world_size=2, timeout_s=0.3
    )
    with pytest.raises(RequestError, match="gloo cannot connect"):
        Group("gloo", store, 0, 2, torch.device("cpu"), info)


def test_a_trainer_that_says_so_is_gone(store: Any) -> None:
    assert not is_gone(store)
    say_gone(store)
    assert is_gone(store)
