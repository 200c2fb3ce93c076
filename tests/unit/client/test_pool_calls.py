"""Calls on all engines of a pool: all do it, or none."""

from __future__ import annotations

import itertools
import signal
from functools import partial

import pytest
from support.fake_members import REFUSAL, FakeMember, FakeWaiter, report
from support.interrupting import Moment, raising_handler

from shmllm.client import pool_adapters
from shmllm.client.pool_calls import PoolCalls, combined
from shmllm.client.revival import NEW_WEIGHTS, Revival
from shmllm.errors import CallError, EngineDeadError, IpcTimeoutError, RequestError
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall


class Engines:
    """What `PoolCalls` needs of a pool of fake members."""

    def __init__(self, count=2):
        self.members = [FakeMember(FakeWaiter()) for _ in range(count)]
        self.dropped = []
        self.events = []

    def each(self, use):
        for index, member in enumerate(self.members):
            try:
                result = use(member)
            except EngineDeadError:
                continue
            yield index, result

    def collect(self):
        self.events.append("collect")

    def clear_cached(self):
        self.events.append("clear")

    def end_prefills(self):
        self.events.append("end_prefills")

    def drop(self, engine, reason):
        self.dropped.append((engine, reason))

    def asked(self, index):
        return [method for method, _ in self.members[index].calls]


SLEEP = {"level": 1, "mode": "keep"}


@pytest.fixture
def engines():
    return Engines()


@pytest.fixture
def calls(engines):
    for member in engines.members:
        member.answers |= {
            Method.SLEEP: report(["kv_cache", "scheduling"]),
            Method.WAKE_UP: report([]),
            Method.FINISH_WEIGHTS: ["a"],
            Method.PAUSE: 2,
            Method.RESUME: True,
        }
    return PoolCalls(engines, None)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("method", "argument", "undo"),
    [
        (Method.PAUSE, "keep", Method.RESUME),
        (Method.START_WEIGHTS, None, Method.ABANDON_WEIGHTS),
        (Method.SLEEP, SLEEP, Method.WAKE_UP),
    ],
)
def test_what_one_engine_refuses_is_undone(engines, calls, method, argument, undo, place):
    engines.members[0].answers.setdefault(method, True)
    engines.members[place].answers[method] = REFUSAL
    with pytest.raises(RequestError, match=f"engine {place} of the pool: no"):
        calls.call(method, argument)
    assert engines.asked(0) == ([method, undo] if place else [method])
    assert engines.asked(1) == ([method] if place else [])
    assert not calls.is_idle


HELD = (Method.HOLD_LORA, 3)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("method", "argument"),
    [(Method.ADD_LORA, {"lora_int_id": 3}), (Method.REMOVE_LORA, 3), (Method.PIN_LORA, 3)],
)
def test_all_engines_restore_an_adapter_that_one_refuses_to_change(
    engines, calls, method, argument, place
):
    engines.members[0].answers.setdefault(method, True)
    engines.members[place].answers[method] = REFUSAL
    with pytest.raises(RequestError, match=f"engine {place} of the pool: no"):
        calls.call(method, argument)
    restored = (Method.RELEASE_LORA, True)
    assert engines.members[0].calls == [HELD, (method, argument), restored]
    assert engines.members[1].calls == [HELD, *[(method, argument)] * place, restored]


def test_an_adapter_that_all_engines_take_is_held_no_more(engines, calls):
    for member in engines.members:
        member.answers[Method.ADD_LORA] = True
    assert calls.call(Method.ADD_LORA, {"lora_int_id": 3})
    for member in engines.members:
        assert member.calls[-1] == (Method.RELEASE_LORA, False)


@pytest.mark.parametrize("options", [{"args": ("name", 3)}, {"kwargs": {"number": 3}}])
def test_engines_restore_an_adapter_whose_tensors_one_refuses(engines, calls, options):
    engines.members[0].run_on_worker = lambda call, timeout_s: None
    engines.members[1].run_on_worker = raising(RequestError("no"))
    with pytest.raises(RequestError, match=r"^engine 1 of the pool: no$"):
        calls.run_on_worker(RpcCall("add_lora", **options), None)
    for member in engines.members:
        assert member.calls == [HELD, (Method.RELEASE_LORA, True)]


def answering(*answers):
    """Answers for the calls of one method, the last one for all further ones."""
    return iter([*answers, *itertools.repeat(answers[-1], 1000)])


def test_a_change_waits_until_another_front_end_holds_the_adapter_no_more(engines, calls):
    """It holds the adapter nowhere while it waits: the other one may need those engines."""
    first, second = engines.members
    answers, answer = answering(False, False, True), second.call

    def call(method, argument=None):
        answer(method, argument)
        return next(answers) if method is Method.HOLD_LORA else None

    second.call = call
    first.answers[Method.ADD_LORA] = True
    assert calls.call(Method.ADD_LORA, {"lora_int_id": 3})
    released, added = (Method.RELEASE_LORA, False), (Method.ADD_LORA, {"lora_int_id": 3})
    attempts = [HELD, released] * 2
    assert first.calls == second.calls == [*attempts, HELD, added, released]
    assert engines.events.count("collect") == 2


def test_a_change_waits_no_longer_than_its_deadline(engines, calls, monkeypatch):
    monkeypatch.setattr(pool_adapters, "WAIT_S", 0.01)
    engines.members[1].answers[Method.HOLD_LORA] = False
    message = "another front end has been changing adapter 3 for 0.01 s"
    with pytest.raises(RequestError, match=message):
        calls.call(Method.REMOVE_LORA, 3)
    for member in engines.members:
        assert member.calls[-1] == (Method.RELEASE_LORA, False)
        assert Method.REMOVE_LORA not in {method for method, _ in member.calls}


def test_an_interrupt_gives_no_half_of_the_engines_another_version(engines, calls):
    """The signal comes while the first engine answers."""
    answer = engines.members[0].call

    def interrupted(method, argument=None):
        signal.raise_signal(signal.SIGINT)
        return answer(method, argument)

    engines.members[0].call = interrupted
    with pytest.raises(KeyboardInterrupt):
        calls.call(Method.SET_WEIGHT_VERSION, "new")
    for index in (0, 1):
        assert engines.asked(index) == [Method.SET_WEIGHT_VERSION]


def test_an_interrupt_undoes_also_what_is_in_doubt(engines, calls):
    engines.members[1].answers[Method.PAUSE] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        calls.call(Method.PAUSE, "keep")
    assert [engines.asked(k) for k in (0, 1)] == [[Method.PAUSE, Method.RESUME]] * 2
    assert not calls.is_idle


@pytest.mark.parametrize(
    ("level", "tags", "undone_to"), [(1, None, 1), (2, None, 2), (2, "kv_cache", 1), (0, None, 0)]
)
def test_engines_that_woke_up_sleep_again_and_lose_no_weights(
    engines, calls, level, tags, undone_to
):
    parts = ["weights", "kv_cache", "scheduling"]
    for member in engines.members:
        member.answers[Method.SLEEP] = report(parts)
    calls.call(Method.SLEEP, {"level": level, "mode": "abort"})
    if tags:
        for member in engines.members:
            member.answers[Method.WAKE_UP] = report(["kv_cache", "scheduling"])
        calls.call(Method.WAKE_UP, ["weights"])
    engines.members[1].answers[Method.WAKE_UP] = REFUSAL
    with pytest.raises(RequestError):
        calls.call(Method.WAKE_UP, None)
    assert engines.members[0].calls[-1] == (Method.SLEEP, {"level": undone_to, "mode": "keep"})
    assert calls.is_idle
    assert calls.is_refusing


def test_a_sleep_that_waits_leaves_out_engines_that_sleep(engines, calls):
    engines.members[1].answers[Method.SLEEP] = 3
    assert calls.call(Method.SLEEP, {"level": 1, "mode": "wait"}) == 3
    assert calls.is_refusing
    engines.members[1].answers[Method.SLEEP] = report(["kv_cache"])
    answer = calls.call(Method.SLEEP, {"level": 1, "mode": "wait"})
    assert answer["report"]["before"]["kv_cache"] == 2
    assert engines.asked(0) == [Method.SLEEP]
    assert engines.asked(1) == [Method.SLEEP] * 2
    assert calls.is_idle


def test_a_sleep_that_is_given_up_wakes_engines_up(engines, calls):
    """The front end calls WAKE_UP without tags then."""
    engines.members[1].answers[Method.SLEEP] = 3
    calls.call(Method.SLEEP, {"level": 1, "mode": "wait"})
    calls.call(Method.WAKE_UP, [])
    assert engines.members[0].calls[1:] == [(Method.WAKE_UP, None), (Method.WAKE_UP, [])]
    assert engines.members[1].calls[1:] == [(Method.WAKE_UP, [])]
    assert not calls.is_idle
    assert not calls.is_refusing


def test_new_weights_come_while_all_engines_pause(engines, calls):
    assert calls.call(Method.FINISH_WEIGHTS, {}) == ["a"]
    order = [Method.CHECK_WEIGHTS, Method.PAUSE, Method.FINISH_WEIGHTS, Method.RESUME]
    assert engines.asked(0) == engines.asked(1) == order
    assert engines.events == ["collect"]


def test_weights_that_one_engine_refuses_change_none(engines, calls):
    engines.members[1].answers[Method.CHECK_WEIGHTS] = REFUSAL
    with pytest.raises(RequestError):
        calls.call(Method.FINISH_WEIGHTS, {})
    assert engines.asked(0) == engines.asked(1) == [Method.CHECK_WEIGHTS]


def test_an_engine_that_fails_after_the_check_leaves_the_pool(engines, calls):
    engines.members[0].answers[Method.FINISH_WEIGHTS] = REFUSAL
    assert calls.call(Method.FINISH_WEIGHTS, {}) == ["a"]
    assert engines.dropped == [(0, "it could not use new weights: no")]
    engines.members[1].answers[Method.FINISH_WEIGHTS] = REFUSAL
    with pytest.raises(RequestError):
        calls.call(Method.FINISH_WEIGHTS, {})
    assert len(engines.dropped) == 1


def test_an_engine_that_joins_is_brought_into_the_state_of_the_others(engines, calls):
    calls.call(Method.PAUSE, "wait")
    calls.call(Method.SLEEP, SLEEP)
    joining = FakeMember(FakeWaiter())
    calls.prepare(joining)
    assert joining.calls == [(Method.PAUSE, "wait"), (Method.SLEEP, SLEEP)]
    assert calls.is_refusing
    calls.call(Method.WAKE_UP, None)
    calls.call(Method.RESUME, None)
    joining = FakeMember(FakeWaiter())
    calls.prepare(joining)
    assert joining.calls == []
    assert not calls.is_refusing


def test_engines_start_again_only_with_the_weights_of_the_files(engines):
    revival = Revival(lambda index: engines.members[index])
    calls = PoolCalls(engines, revival)
    calls.call(Method.START_WEIGHTS, None)
    assert revival.begin(0) == NEW_WEIGHTS
    calls.call(Method.ABANDON_WEIGHTS, None)
    assert revival.begin(0) == ""
    for member in engines.members:
        member.answers |= {Method.FINISH_WEIGHTS: ["a"], Method.PAUSE: 0}
    calls.call(Method.START_WEIGHTS, None)
    calls.call(Method.FINISH_WEIGHTS, {})
    assert revival.begin(1) == NEW_WEIGHTS


def test_an_engine_that_starts_again_gets_the_adapters(engines):
    revival = Revival(lambda index: FakeMember(FakeWaiter()))
    calls = PoolCalls(engines, revival)
    for number in (1, 2):
        calls.call(Method.ADD_LORA, {"lora_int_id": number})
        calls.call(Method.PIN_LORA, number)
    calls.call(Method.REMOVE_LORA, 1)
    revival.begin(0)
    ((index, client),) = revival.ready(calls.prepare)
    assert index == 0
    assert client.calls == [(Method.ADD_LORA, {"lora_int_id": 2}), (Method.PIN_LORA, 2)]
    assert not revival.is_busy


def test_functions_give_the_results_of_all_engines_and_methods_of_one(engines, calls):
    for index, member in enumerate(engines.members):
        member.run_on_worker = lambda call, timeout_s, index=index: [index]
    assert calls.run_on_worker(RpcCall(len), None) == [0, 1]
    assert calls.run_on_worker(RpcCall("list_weights"), 1.0) == [0]


def raising(error):
    def run(call, timeout_s):
        raise error

    return run


def test_an_engine_that_does_not_reload_weights_in_time_leaves_the_pool(engines):
    revival = Revival(lambda index: engines.members[index])
    calls, reload = PoolCalls(engines, revival), RpcCall("reload_weights")
    engines.members[0].run_on_worker = raising(IpcTimeoutError("too slow"))
    engines.members[1].run_on_worker = lambda call, timeout_s: "read"
    assert calls.run_on_worker(reload, 0.1) == "read"
    assert engines.dropped == [(0, "it could not use new weights: too slow")]
    assert revival.begin(0) == NEW_WEIGHTS


def test_weights_that_no_engine_can_reload_drop_none(engines, calls):
    for member in engines.members:
        member.run_on_worker = raising(CallError("no such directory"))
    with pytest.raises(CallError, match="no such directory"):
        calls.run_on_worker(RpcCall("reload_weights", ("x",)), None)
    assert not engines.dropped


def test_an_interrupt_does_not_reload_the_weights_of_some_engines(engines, calls):
    reloaded = []

    def interrupt(call, timeout_s):
        reloaded.append(0)
        signal.raise_signal(signal.SIGINT)
        return "read"

    engines.members[0].run_on_worker = interrupt
    engines.members[1].run_on_worker = lambda call, timeout_s: reloaded.append(1) or "read"
    with pytest.raises(KeyboardInterrupt):
        calls.run_on_worker(RpcCall("reload_weights"), None)
    assert reloaded == [0, 1]


def test_checksums_that_differ_are_an_error(engines, calls):
    for index, member in enumerate(engines.members):
        member.run_on_worker = lambda call, timeout_s, index=index: {"a": str(index)}
    with pytest.raises(CallError, match="engines of the pool have different weights"):
        calls.run_on_worker(RpcCall("compute_weight_checksums"), None)


@pytest.mark.parametrize("method", [len, "list_weights", "reload_weights"])
def test_a_call_is_sent_to_all_engines_before_a_result_is_awaited(engines, calls, method):
    events = []
    for index, member in enumerate(engines.members):
        member.events = events
        member.run_on_worker = lambda call, timeout_s, index=index: events.append(index) or [index]
    calls.run_on_worker(RpcCall(method), None)
    assert events == [*["prepare"] * 2, *["send"] * 2, 0, 1, *["end"] * 2]


def test_a_call_that_cannot_be_transmitted_to_one_engine_reaches_none(engines, calls):
    engines.members[1].problem = RequestError("too large")
    with pytest.raises(RequestError, match=r"^too large$"):
        calls.run_on_worker(RpcCall(len), None)
    assert [member.events for member in engines.members] == [["prepare", "end"]] * 2


@pytest.mark.parametrize("error", [CallError("no", "trace"), IpcTimeoutError("no"), REFUSAL])
def test_what_fails_at_some_engines_names_them(engines, calls, error):
    error = type(error)(*error.args)
    engines.members[0].run_on_worker = lambda call, timeout_s: [0]
    engines.members[1].run_on_worker = raising(error)
    with pytest.raises(type(error)) as caught:
        calls.run_on_worker(RpcCall("load_weights"), None)
    assert caught.value is error
    assert error.args == (
        "engine 1 of the pool: no; engine 0 of the pool ran the call, so their states may differ",
    )
    assert not engines.dropped


def test_different_errors_of_all_engines_are_one(engines, calls):
    engines.members[0].run_on_worker = raising(IpcTimeoutError("too slow"))
    engines.members[1].run_on_worker = raising(CallError("no"))
    with pytest.raises(IpcTimeoutError) as caught:
        calls.run_on_worker(RpcCall(len), None)
    assert caught.value.args == (
        "engine 0 of the pool: too slow; engine 1 of the pool: no, so their states may differ",
    )


def test_an_engine_that_ends_in_a_call_has_no_part_in_its_errors(engines, calls):
    engines.members[0].is_dead = True
    engines.members[1].run_on_worker = raising(CallError("no"))
    with pytest.raises(CallError, match=r"^no$"):
        calls.run_on_worker(RpcCall(len), None)


def test_an_interrupt_at_any_line_sends_a_call_to_all_engines_or_none():
    for number in itertools.count(1):
        engines = Engines()
        for member in engines.members:
            member.run_on_worker = lambda call, timeout_s: [0]
        calls, moment = PoolCalls(engines, None), Moment(number, ("shmllm/client/",))
        with raising_handler():
            moment.call(partial(calls.run_on_worker, RpcCall(len), None))
        events = [member.events for member in engines.members]
        assert len({each.count("send") for each in events}) == 1, moment.where
        assert all("end" in each for each in events if "prepare" in each), moment.where
        if moment.where is None:
            break
    assert number > 100


def test_a_pool_lends_no_memory_of_a_gpu(calls):
    with pytest.raises(RequestError, match="through host memory"):
        calls.call(Method.LEND_MEMORY, {})


def test_answers_are_combined():
    assert combined(Method.PAUSE, [1, 2]) == 3
    assert combined(Method.RESUME, [True, False]) is False
    assert combined(Method.ADD_LORA, [False, True]) is True
    assert combined(Method.LIST_LORAS, [[1], [1]]) == [1]
