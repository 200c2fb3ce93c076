"""Processes that share an engine, as threads that share a queue; the engine is a fake."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shmllm
from shmllm import EngineDeadError, EngineStartError, ShmLLMError
from shmllm.compat import external_launcher, vllm_engine
from shmllm.compat.external_launcher import CALLS, SharedLLM, TorchGroup

PATIENCE_S = 60
WITHOUT_SHARING = {
    *("stream", "attach", "from_engine_args", "close", "shutdown", "update_weights"),
    *("find_io_processor", "engine_errors"),
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    *("start_draft_weight_update", "prepare_prompts"),
}


class FakeGroup:
    """Two processes. What the first one shares goes through a queue."""

    def __init__(self, channel: queue.Queue[bytes], leads: bool) -> None:
        self.channel = channel
        self.leads = leads

    def share(self, data: bytes) -> bytes:
        if self.leads:
            self.channel.put(data)
            return data
        return self.channel.get(timeout=PATIENCE_S)


class FakeLLM:
    facts, model_defaults, engine_pid = SimpleNamespace(max_num_seqs=4), {"top_k": 1}, 4711

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.is_closed = False

    def generate(self, prompts: list[str], **options: Any) -> list[str]:
        self.calls.append((prompts, options))
        return [prompt.upper() for prompt in prompts]

    def update_weights(self, weights: Iterator[Any], **options: Any) -> None:
        self.calls.append((list(weights), options))

    def wake_up(self) -> Any:
        return lambda: None  # which no pickle can hold

    def sleep(self) -> None:
        raise EngineDeadError("engine died", exit_code=3)

    def health(self) -> None:
        raise KeyError("state")

    def close(self) -> None:
        self.is_closed = True


def both(first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    """What two processes' calls return, or the exceptions that they raise."""
    results: list[Any] = [None, None]

    def run(rank: int, call: Callable[[], Any]) -> None:
        try:
            results[rank] = call()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results


@pytest.fixture
def channel() -> queue.Queue[bytes]:
    return queue.Queue()


@pytest.fixture
def llms(channel: queue.Queue[bytes]) -> list[SharedLLM]:
    return both(
        lambda: SharedLLM(FakeGroup(channel, leads=True), FakeLLM),
        lambda: SharedLLM(FakeGroup(channel, leads=False), pytest.fail),
    )


def test_the_first_process_calls_and_all_get_the_result(llms: list[SharedLLM]) -> None:
    one, other = llms
    results = both(lambda: one.generate(["a"], use_tqdm=False), lambda: other.generate(["b"]))
    assert results == [["A"], ["A"]]
    assert one._llm.calls == [(["a"], {"use_tqdm": False})]
    assert other._llm is None
    assert one.engine_pid == other.engine_pid == 4711
    assert one.model_defaults == other.model_defaults


def test_each_process_iterates_over_its_weights(llms: list[SharedLLM]) -> None:
    seen: list[list[str]] = [[], []]

    def weights(rank: int) -> Iterator[tuple[str, int]]:
        for name in ("a", "b"):
            seen[rank].append(name)
            yield name, 0

    one, other = llms
    both(lambda: one.update_weights(weights(0)), lambda: other.update_weights(weights(1)))
    assert seen == [["a", "b"]] * 2
    assert one._llm.calls == [([("a", 0), ("b", 0)], {})]


def test_errors_are_raised_in_all(llms: list[SharedLLM]) -> None:
    one, other = llms
    first, second = both(one.sleep, other.sleep)
    assert isinstance(first, EngineDeadError)
    assert first.exit_code == 3
    assert isinstance(second, EngineDeadError)
    assert str(second) == "engine died"


def test_an_error_of_another_kind_is_named(llms: list[SharedLLM]) -> None:
    one, other = llms
    first, second = both(one.health, other.health)
    assert isinstance(first, KeyError)
    assert type(second) is ShmLLMError
    assert str(second) == "KeyError: 'state'"


def test_a_result_that_cannot_be_sent_is_an_error_in_all(llms: list[SharedLLM]) -> None:
    one, other = llms
    assert all(isinstance(each, Exception) for each in both(one.wake_up, other.wake_up))
    assert both(lambda: one.generate([]), lambda: other.generate([])) == [[], []]


def test_different_calls_are_detected(llms: list[SharedLLM]) -> None:
    one, other = llms
    _, second = both(lambda: one.generate(["a"]), other.sleep)
    assert "called sleep and the one that has the engine generate" in str(second)


def test_an_engine_that_does_not_start(channel: queue.Queue[bytes]) -> None:
    def make() -> Any:
        raise EngineStartError("no model")

    for error in both(
        lambda: SharedLLM(FakeGroup(channel, leads=True), make),
        lambda: SharedLLM(FakeGroup(channel, leads=False), make),
    ):
        assert isinstance(error, EngineStartError)
        assert str(error) == "no model"


def test_without_a_launcher_the_message_names_one() -> None:
    with pytest.raises(ShmLLMError, match=r"torch\.distributed has 0: start a multiple of 2 with"):
        TorchGroup(2)


def test_the_first_process_ends_the_engine_alone(llms: list[SharedLLM]) -> None:
    one, other = llms
    other.close()
    assert not one._llm.is_closed
    one.close()
    assert one._llm.is_closed


def test_every_method_of_an_llm_is_shared_or_excluded() -> None:
    of_llm = {
        name
        for name in dir(vllm_engine.LLM)
        if not name.startswith("_") and callable(getattr(vllm_engine.LLM, name))
    }
    shared = {name for name in CALLS if not name.startswith("_")}
    assert of_llm - shared == WITHOUT_SHARING
    assert shared <= of_llm


def test_a_method_that_is_excluded_has_an_error(llms: list[SharedLLM]) -> None:
    with pytest.raises(AttributeError, match=r"no LLM\.stream"):
        _ = llms[0].stream


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the groups that processes of a launcher form. This is the first process."""
    sizes: list[int] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(external_launcher, "_join_default_group", lambda: sizes.append(0))

    def group(size: int) -> FakeGroup:
        sizes.append(size)
        return FakeGroup(queue.Queue(), leads=True)

    monkeypatch.setattr(external_launcher, "TorchGroup", group)
    return sizes


SHARED = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}


@pytest.mark.parametrize(("stages", "size"), [(1, 2), (3, 6)])
def test_processes_of_a_launcher_share_an_engine(
    stages: int, size: int, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def fake_init(llm: Any, model: str, **options: Any) -> None:
        given.append((model, options))
        llm.facts, llm.model_defaults, llm._client = None, {}, SimpleNamespace(pid=1)

    monkeypatch.setattr(shmllm.LLM, "__init__", fake_init)
    llm = vllm_engine.LLM("tiny", **SHARED, pipeline_parallel_size=stages, seed=1)
    assert isinstance(llm, SharedLLM)
    assert joined == [0, size]
    ((_, options),) = given
    assert options["tensor_parallel_size"] == 2
    assert "distributed_executor_backend" not in options


def test_a_process_of_a_launcher_has_an_engine_of_its_own(joined: list[int]) -> None:
    alone = SHARED | {"tensor_parallel_size": None}
    assert external_launcher.shared_llm(alone, FakeLLM) is None
    assert joined == [0]


def test_without_a_launcher_no_engine_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert external_launcher.shared_llm(SHARED, FakeLLM) is None


def test_an_engine_begins_at_the_gpu_of_its_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert external_launcher.own_options(SHARED)["device"] == "cuda:2"
    assert external_launcher.own_options(SHARED | {"device": "cpu"})["device"] == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "device" not in external_launcher.own_options(SHARED)
