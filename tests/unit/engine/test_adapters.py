"""The engine's adapters: which are known and in memory, and which requests may run together."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import FakeRunner, info

from shmllm.client.rpc_client import content_of
from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.config.lora import LoraConfig
from shmllm.engine.calls import reply_to
from shmllm.engine.core import EngineCore
from shmllm.engine.worker import Worker
from shmllm.errors import EngineStartError, RequestError
from shmllm.params.lora import LoRARequest
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Call, Method
from shmllm.wire.rpc import RpcCall

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Bench:
    """An engine core with a fake runner, and directories with fake adapters."""

    def __init__(self, directory: Path, policy: str = "fcfs", **options: int) -> None:
        self._directory = directory
        self._number = 0
        config = EngineConfig(
            LoadConfig("nowhere"),
            CacheConfig(block_size=8),
            SchedulerConfig(8, 64, policy=policy),  # type: ignore[arg-type]
            lora=LoraConfig(enable_lora=True, **options),
        )
        self.runner = FakeRunner(info(block_size=8, num_blocks=64, scheduling_policy=policy))
        self.core = EngineCore(config, self.runner)
        self.adapters = self.core.adapters

    def write(self, number: int, contents: str) -> LoRARequest:
        directory = self._directory / str(number)
        directory.mkdir(exist_ok=True)
        (directory / "contents").write_text(contents)
        return LoRARequest(f"adapter-{number}", number, str(directory))

    def ask(
        self, lora: LoRARequest | None, max_tokens: int = 2, priority: int = 0, client: int = 0
    ) -> int:
        """Queues a request; returns its number."""
        self._number += 1
        request = EngineCoreRequest(
            self._number,
            PROMPT,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            priority=priority,
            lora=lora,
        )
        rejected = self.core.add(client, request)
        assert rejected is None, rejected
        return self._number

    def run(self) -> list[set[int]]:
        """Runs all requests; returns the adapters of each step."""
        steps = []
        while self.core.has_unfinished:
            self.core.step()
            steps.append({request.lora_id for request in self.runner.plans[-1].requests})
            self.core.scheduler.check_integrity()
        assert not self.core.take_failures()
        return steps

    def admitted(self) -> list[int]:
        """The adapters of the admitted requests, in their order."""
        return [
            request.lora_id
            for plan in self.runner.plans
            for request in plan.requests
            if any(new.row == request.row for new in plan.new_requests)
        ]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, max_loras=1, max_cpu_loras=2)


def test_requests_of_three_adapters_all_end_with_room_for_one(bench: Bench) -> None:
    loras = [bench.write(number, f"text {number}") for number in (1, 2, 3)]
    for index in range(9):
        bench.ask(loras[index % 3])
    assert all(len(adapters) == 1 for adapters in bench.run())
    assert bench.admitted() == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_requests_without_an_adapter_pass_those_whose_adapter_has_no_room(bench: Bench) -> None:
    one, two = bench.write(1, "one"), bench.write(2, "two")
    for lora in (one, two, None, one, two):
        bench.ask(lora)
    bench.run()
    assert bench.admitted() == [1, 0, 1, 2, 2]


def test_with_enough_room_requests_keep_their_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_loras=3)
    one, two = bench.write(1, "one"), bench.write(2, "two")
    for lora in (one, two, None, two, one):
        bench.ask(lora)
    bench.run()
    assert bench.admitted() == [1, 2, 0, 2, 1]


def test_priorities_choose_among_adapters_with_room(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="priority", max_loras=1)
    one, two = bench.write(1, "one"), bench.write(2, "two")
    for lora, priority in ((one, 5), (two, 1), (two, 9), (one, 0), (None, 7)):
        bench.ask(lora, priority=priority)
    bench.run()
    assert bench.admitted() == [1, 1, 0, 2, 2]


def test_a_request_is_not_passed_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmllm.core.waiting_queue.MOST_PASSED", 5)
    one, two = bench.write(1, "one"), bench.write(2, "two")
    bench.ask(one)
    bench.ask(two)
    for _ in range(20):
        bench.ask(one)
    bench.run()
    assert bench.admitted().index(2) == 6


def test_a_failing_directory_is_one_error(bench: Bench) -> None:
    good = bench.write(1, "one")
    request = EngineCoreRequest(
        99, PROMPT, SamplingParams(), lora=LoRARequest("bad", 7, "/nowhere")
    )
    rejected = bench.core.add(0, request)
    assert rejected is not None
    assert "cannot read /nowhere" in rejected.message
    bench.ask(good)
    assert bench.run()
    assert bench.adapters.ids == [1]


def test_an_adapter_that_has_vanished_fails_its_waiting_requests_only(bench: Bench) -> None:
    loras = [bench.write(number, f"text {number}") for number in (1, 2, 3)]
    numbers = [bench.ask(lora) for lora in loras]  # the third one evicts the first
    bench.ask(None)
    Path(loras[0].lora_path, "contents").unlink()
    while bench.core.has_unfinished:
        bench.core.step()
    (failure,) = bench.core.take_failures()
    assert failure.number == numbers[0]
    assert "cannot read" in failure.message


def test_the_least_recently_used_adapter_makes_room(bench: Bench) -> None:
    one, two, three = (bench.write(number, f"text {number}") for number in (1, 2, 3))
    for lora in (one, two, one, three):
        bench.ask(lora)
        bench.run()
    assert bench.runner.num_adapters_read == 3
    bench.ask(one)
    bench.run()
    assert bench.runner.num_adapters_read == 3
    bench.ask(two)
    bench.run()
    assert bench.runner.num_adapters_read == 4
    assert bench.adapters.ids == [1, 2, 3]


def test_a_pinned_adapter_stays(bench: Bench) -> None:
    one, *others = (bench.write(number, f"text {number}") for number in (1, 2, 3, 4))
    assert bench.adapters.add(one)
    assert bench.adapters.pin(1)
    for lora in (*others, one):
        bench.ask(lora)
        bench.run()
    assert bench.runner.num_adapters_read == 4
    with pytest.raises(RequestError, match="no adapter 9"):
        bench.adapters.pin(9)


def hits(bench: Bench) -> int:
    return bench.core.scheduler.stats.prefix_hit_tokens


def test_blocks_are_hits_for_the_same_contents_only(bench: Bench) -> None:
    lora = bench.write(1, "one")
    for asked, expected in ((lora, 0), (lora, 8), (None, 8), (None, 16), (lora, 24)):
        bench.ask(asked)
        bench.run()
        assert hits(bench) == expected
    same = bench.write(2, "one")
    bench.ask(same)
    bench.run()
    assert hits(bench) == 32


def test_contents_that_changed_on_disk_hit_no_stale_block(bench: Bench) -> None:
    lora = bench.write(1, "one")
    bench.ask(lora)
    bench.run()
    bench.write(1, "changed")
    assert not bench.adapters.add(lora)
    assert bench.adapters.add(LoRARequest("adapter-1", 1, lora.lora_path, load_inplace=True))
    bench.ask(lora)
    bench.run()
    assert hits(bench) == 0
    assert bench.runner.plans[-1].requests[0].adapter.digest == "changed"


def test_running_requests_continue_with_replaced_contents(bench: Bench) -> None:
    lora = bench.write(1, "one")
    bench.ask(lora, max_tokens=30)
    for _ in range(12):
        bench.core.step()
    bench.write(1, "changed")
    bench.core.settle()
    bench.adapters.add(LoRARequest("adapter-1", 1, lora.lora_path, load_inplace=True))
    bench.core.step()
    plan = bench.runner.plans[-1]
    assert plan.requests[0].adapter.digest == "changed"
    assert not plan.is_repeat
    bench.run()
    bench.ask(lora)
    bench.run()
    assert hits(bench) == 0


def test_an_adapter_is_removed_when_no_request_uses_it(bench: Bench) -> None:
    lora = bench.write(1, "one")
    bench.ask(lora)
    with pytest.raises(RequestError, match="adapter 1 has 1 requests"):
        bench.adapters.remove(1)
    bench.run()
    assert bench.adapters.remove(1)
    assert not bench.adapters.remove(1)
    assert bench.adapters.ids == []


def test_another_directory_under_the_same_number_is_refused(bench: Bench) -> None:
    bench.adapters.add(bench.write(1, "one"))
    with pytest.raises(RequestError, match=r"adapter 1 is 'adapter-1' from .*load_inplace=True"):
        bench.adapters.add(LoRARequest("other", 1, "/elsewhere"))
    with pytest.raises(RequestError, match=r"has no adapter 5 \(new\)"):
        bench.adapters.add(LoRARequest("new", 5))


def test_an_engine_without_adapters_refuses_them(tmp_path: Path) -> None:
    core = EngineCore(EngineConfig(LoadConfig("nowhere")), FakeRunner(info()))
    with pytest.raises(RequestError, match="enable_lora=True"):
        core.adapters.add(LoRARequest("a", 1, str(tmp_path)))


def test_fewer_adapters_in_memory_than_in_a_step_are_refused() -> None:
    with pytest.raises(EngineStartError, match=r"max_cpu_loras \(1\) must be at least max_loras"):
        LoraConfig(max_loras=2, max_cpu_loras=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1), "lora_name must be a text"),
        (("a", 0), "lora_int_id must be a whole number from 1, got 0"),
        (("a", True), "lora_int_id must be a whole number from 1, got True"),
        (("a", 1, "x\0y"), "lora_path must be a directory"),
    ],
)
def test_invalid_requests_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LoRARequest(*arguments)  # type: ignore[arg-type]


def test_equal_names_are_equal_requests() -> None:
    assert LoRARequest("a", 1, "/x") == LoRARequest("a", 2, "/y") != LoRARequest("b", 1, "/x")
    assert len({LoRARequest("a", 1), LoRARequest("a", 2)}) == 1


def test_modules_of_transformers_have_no_adapters() -> None:
    load = LoadConfig("nowhere", model_impl="transformers")
    with pytest.raises(EngineStartError, match="not possible with model_impl='transformers'"):
        EngineConfig(load, lora=LoraConfig(enable_lora=True))


@pytest.mark.parametrize("change", ["add", "remove", "pin", "replace"])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_held_adapter_is_restored(bench: Bench, change: str, is_known: bool) -> None:
    adapters, lora = bench.adapters, bench.write(1, "old")
    if is_known:
        adapters.add(lora)
    before = [*map(repr, adapters._known.items())]
    adapters.hold(0, 1)
    if change == "remove":
        adapters.remove(1)
    elif is_known or change != "pin":
        new = replace(bench.write(1, "new"), load_inplace=change == "replace")
        adapters.pin(1) if change == "pin" else adapters.add(new)
    adapters.release(0, restore=True)
    assert [*map(repr, adapters._known.items())] == before
    adapters.release(0, restore=True)  # nothing is held any more


def test_an_adapter_of_tensors_is_restored(bench: Bench) -> None:
    lora = LoRARequest("a", 1)
    adapters = bench.adapters
    made = bench.runner.read_lora(bench.write(1, "old").lora_path)
    adapters.add_made(lora, lambda: made)
    adapters.hold(0, 1)
    adapters.remove(1)
    adapters.release(0, restore=True)
    assert adapters._known[1].loaded is made


def test_an_adapter_is_held_by_one_front_end_at_a_time(bench: Bench) -> None:
    adapters = bench.adapters
    assert adapters.hold(0, 1)
    assert adapters.hold(0, 1)  # an interrupt may have ended what it wanted before
    assert not adapters.hold(1, 1)
    assert adapters.hold(1, 2)
    adapters.add(bench.write(1, "text"))
    adapters.release(1, restore=True)
    assert adapters.ids == [1]
    adapters.release(0, restore=True)
    assert adapters.ids == []
    assert adapters.hold(1, 1)


def test_others_do_not_change_what_a_front_end_holds(bench: Bench) -> None:
    adapters = bench.adapters
    adapters.hold(0, 1)
    adapters.check_free(0, 1)
    adapters.check_free(1, 2)
    with pytest.raises(RequestError, match="another front end is changing adapter 1: try again"):
        adapters.check_free(1, 1)
    adapters.release(0, restore=False)
    adapters.check_free(1, 1)


def call(bench: Bench, client: int, method: Method, argument: Any) -> Any:
    return content_of(reply_to(bench.core, client, Call(1, method, json.dumps(argument))))


def test_a_change_of_another_front_end_is_refused_while_an_adapter_is_held(bench: Bench) -> None:
    lora = asdict(bench.write(1, "text"))
    assert call(bench, 0, Method.HOLD_LORA, 1)
    assert not call(bench, 1, Method.HOLD_LORA, 1)
    bench.runner.model = SimpleNamespace(weights_version=0)
    worker = Worker(bench.core)
    tensors = RpcCall("add_lora", ("sent", 1, {}, {}))
    changes = {Method.ADD_LORA: lora, Method.REMOVE_LORA: 1, Method.PIN_LORA: 1}
    for method, argument in changes.items():
        with pytest.raises(RequestError, match="another front end is changing adapter 1"):
            call(bench, 1, method, argument)
    with pytest.raises(RequestError, match="another front end is changing adapter 1"):
        worker.run(tensors, client=1)
    assert call(bench, 0, Method.ADD_LORA, lora)
    call(bench, 0, Method.RELEASE_LORA, False)
    assert call(bench, 1, Method.REMOVE_LORA, 1)


def test_what_a_front_end_has_not_ended_at_its_own_end_is_restored(bench: Bench) -> None:
    adapters, core = bench.adapters, bench.core
    adapters.add(bench.write(1, "old"))
    before = [*map(repr, adapters._known.items())]
    adapters.hold(5, 1)
    adapters.add(replace(bench.write(1, "new"), load_inplace=True))
    core.forget_client(4)
    assert core.holds_up_others(5)
    core.forget_client(5)
    assert not core.holds_up_others(5)
    assert [*map(repr, adapters._known.items())] == before


def test_a_new_adapter_that_others_use_outlives_the_front_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    lora = bench.write(2, "text")
    bench.adapters.hold(5, 2)
    bench.adapters.add(lora)
    bench.ask(lora, client=4)
    bench.core.forget_client(5)
    assert bench.adapters.ids == [2]
    assert "keeps what a front end changed before it ended: adapter 2 has 1 req" in caplog.text
    bench.run()


def test_only_the_front_end_that_holds_an_adapter_restores_it(bench: Bench) -> None:
    bench.adapters.hold(0, 1)
    bench.adapters.add(bench.write(1, "text"))
    bench.adapters.release(1, restore=True)
    assert bench.adapters.ids == [1]
    bench.adapters.release(0, restore=False)
    bench.adapters.release(0, restore=True)
    assert bench.adapters.ids == [1]
