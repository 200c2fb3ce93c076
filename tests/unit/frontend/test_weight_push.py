"""WeightPush: the calls and buckets of an update, and the state after an error."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from support.fake_sharing import UUID, FakeSharing
from support.fakes import info
from support.waiting import PATIENCE_S, wait_until

from shmllm.errors import (
    CallError,
    CallOrderError,
    EngineDeadError,
    RequestError,
    ShmLLMError,
)
from shmllm.frontend.cancelled_calls import call_in_thread
from shmllm.frontend.weights.push import WeightPush
from shmllm.wire.messages import Method
from shmllm.wire.weight_bucket import as_pieces, pieces_of

SIZE = 128


class Lease:
    def __init__(self):
        self.buffer = memoryview(bytearray(SIZE))
        self.is_sent = False
        self.is_aborted = False


class FakeDispatcher:
    """Records calls and buckets.

    Attributes:
        sent: the calls, as (method, argument), and the names in each bucket, in their order.
        leases: all buckets that were claimed.
        refuse: the exceptions that methods raise.
        values: the values of each weight that was sent.
        memory: the memory that was lent, by its handle.
    """

    def __init__(self):
        self.memory = None
        self.sent = []
        self.leases = []
        self.refuse = {}
        self.values = {}

    def call(self, method, argument=None):
        self.sent.append((method, argument))
        if method in self.refuse:
            raise self.refuse[method]
        if method is Method.STAGE_LENT:
            self.take(as_pieces(json.loads(json.dumps(argument)), len(self.memory)), self.memory)
        return ["a"] if method is Method.FINISH_WEIGHTS else None

    def use_client(self, function):
        return function(self)

    def claim_bucket(self):
        self.leases.append(Lease())
        return self.leases[-1]

    def discard_bucket(self):
        if self.leases and not self.leases[-1].is_sent:
            self.leases[-1].is_aborted = True

    def send_bucket(self, bucket, text):
        bucket.is_sent = True
        pieces = pieces_of(text, SIZE)
        self.sent.append([piece.name for piece in pieces])
        self.take(pieces, bucket.buffer)

    def take(self, pieces, memory):
        for piece in pieces:
            values = np.frombuffer(memory, piece.dtype, piece.length, piece.offset)
            self.values.setdefault(piece.name, []).extend(values.tolist())


class Sharing(FakeSharing):
    """The dispatcher sees what has arrived in the memory."""

    def __init__(self, dispatcher, refusal=""):
        super().__init__(refusal)
        self._dispatcher = dispatcher

    def export(self, num_bytes, device):
        memory = super().export(num_bytes, device)
        self._dispatcher.memory = memory._shared.numpy()
        return memory


@pytest.fixture
def dispatcher():
    return FakeDispatcher()


@pytest.fixture
def push(dispatcher):
    """A push to an engine on a CPU."""
    return WeightPush(dispatcher, info(), FakeSharing())


@pytest.fixture
def sharing(dispatcher):
    return Sharing(dispatcher)


@pytest.fixture
def gpu_push(dispatcher, sharing):
    """A push to an engine on the fake GPU, with buckets of 2 MiB."""
    return WeightPush(dispatcher, info(device_uuid=UUID, weight_bytes=2**21), sharing)


def methods(dispatcher):
    return [item if isinstance(item, list) else item[0].name for item in dispatcher.sent]


def test_update_is_a_complete_update(dispatcher, push):
    weights = {"a": torch.arange(40.0), "b": np.ones(2, np.float32)}
    assert push.update(weights, version=3) == {"a"}
    assert methods(dispatcher) == ["START_WEIGHTS", ["a"], ["a", "b"], "FINISH_WEIGHTS"]
    assert dispatcher.sent[-1][1] == {"version": 3}
    assert dispatcher.values == {"a": list(range(40)), "b": [1, 1]}
    assert not push.is_open


def test_a_generator_may_use_the_same_memory_for_all_its_tensors(dispatcher, push):
    buffer = torch.empty(4)

    def weights():
        for value in range(6):
            yield str(value), buffer.fill_(value)

    push.update(weights())
    assert dispatcher.values == {str(v): [v] * 4 for v in range(6)}


def test_several_calls_make_one_update(dispatcher, push):
    push.start()
    push.add([("a", torch.ones(1))])
    push.add([])
    push.finish(version=None)
    assert methods(dispatcher) == [
        "START_WEIGHTS",
        ["a"],
        "CHECK_WEIGHTS",
        "CHECK_WEIGHTS",
        "FINISH_WEIGHTS",
    ]


def test_calls_in_the_wrong_order_are_errors(push):
    for call in (push.finish, lambda: push.add([])):
        with pytest.raises(CallOrderError, match="start_weight_update"):
            call()
    push.abandon()


class SlowWeights:
    """Weights of which the second one comes when it is asked for."""

    def __init__(self):
        self.is_begun = threading.Event()
        self.go_on = threading.Event()

    def __iter__(self):
        yield "a", torch.ones(1)
        self.is_begun.set()
        assert self.go_on.wait(PATIENCE_S)
        yield "b", torch.ones(1)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_call_during_another_one_is_refused_and_changes_nothing(dispatcher, push, in_parts):
    if in_parts:
        push.start()
    weights = SlowWeights()
    thread = threading.Thread(target=push.add if in_parts else push.update, args=(weights,))
    thread.start()
    assert weights.is_begun.wait(PATIENCE_S)
    assert push.is_open == in_parts
    sent = methods(dispatcher)
    others = [push.start, push.finish, push.abandon]
    others += [partial(push.add, {}), partial(push.update, {"c": torch.ones(1)})]
    for call in others:
        with pytest.raises(CallOrderError, match="another call"):
            call()
    assert methods(dispatcher) == sent
    weights.go_on.set()
    thread.join()
    if in_parts:
        push.finish()
    assert dispatcher.values == {"a": [1], "b": [1]}
    assert methods(dispatcher)[-1] == "FINISH_WEIGHTS"


def test_an_update_within_the_generator_of_another_one_is_refused(dispatcher, push):
    def weights():
        yield "a", torch.ones(1)
        push.update([])

    with pytest.raises(CallOrderError, match="another call"):
        push.update(weights())
    assert methods(dispatcher) == ["START_WEIGHTS", "ABANDON_WEIGHTS"]
    push.update([])


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_cancelled_update_is_abandoned_and_the_next_one_waits_for_that(
    dispatcher, push, in_parts
):
    async def main():
        if in_parts:
            await call_in_thread(push.start)
        weights = SlowWeights()
        first = partial(push.add if in_parts else push.update, weights)
        task = asyncio.create_task(call_in_thread(first))
        assert await asyncio.to_thread(weights.is_begun.wait, PATIENCE_S)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        second = asyncio.create_task(call_in_thread(partial(push.update, {"c": torch.ones(1)})))
        weights.go_on.set()
        await second

    asyncio.run(main())
    assert methods(dispatcher) == [
        "START_WEIGHTS",
        "ABANDON_WEIGHTS",
        "START_WEIGHTS",
        ["c"],
        "FINISH_WEIGHTS",
    ]


def test_what_a_cancelled_start_began_is_no_update_of_several_calls(dispatcher, push):
    async def main():
        task = asyncio.create_task(call_in_thread(push.start))
        await asyncio.sleep(0)  # the thread starts, and the task does not hear of its end
        wait_until(lambda: push.is_open and not push._inside, "the update is begun")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not push.is_open
    push.update({"c": torch.ones(1)})
    assert methods(dispatcher) == [
        "START_WEIGHTS",
        "ABANDON_WEIGHTS",
        "START_WEIGHTS",
        ["c"],
        "FINISH_WEIGHTS",
    ]


@pytest.mark.parametrize("where", [Method.CHECK_WEIGHTS, Method.FINISH_WEIGHTS])
def test_a_refusal_ends_the_update(dispatcher, push, where):
    dispatcher.refuse[where] = RequestError("no weight")
    push.start()
    calls = [lambda: push.add([("a", torch.ones(1))]), push.finish]
    with pytest.raises(RequestError, match="no weight"):  # noqa: PT012
        for call in calls:
            call()
    assert not push.is_open
    dispatcher.refuse.clear()
    push.start()


def test_an_exception_of_the_generator_abandons_the_update(dispatcher, push):
    def weights():
        yield "a", torch.ones(1)
        raise KeyError("b")

    with pytest.raises(KeyError):
        push.update(weights())
    assert [lease.is_aborted for lease in dispatcher.leases] == [True]
    assert methods(dispatcher) == ["START_WEIGHTS", "ABANDON_WEIGHTS"]


def test_a_refused_start_abandons_nothing(dispatcher, push):
    dispatcher.refuse[Method.START_WEIGHTS] = CallOrderError("another one's")
    with pytest.raises(CallOrderError):
        push.update([])
    assert methods(dispatcher) == ["START_WEIGHTS"]


@pytest.mark.parametrize(
    "weights", [[(1, torch.ones(1))], [("a", [1.0])], ["name"], [("a", torch.ones(1), 2)], [3]]
)
def test_items_that_are_no_pairs_are_refused(dispatcher, push, weights):
    with pytest.raises(RequestError, match="pairs"):
        push.update(weights)
    assert methods(dispatcher)[-1] == "ABANDON_WEIGHTS"


def test_tensors_on_the_engines_gpu_go_through_memory_there(dispatcher, gpu_push, sharing):
    weights = {"a": torch.arange(40.0), "b": torch.ones(2).t(), "c": torch.zeros(0)}
    assert gpu_push.update(weights, version=3) == {"a"}
    assert methods(dispatcher) == ["START_WEIGHTS", "LEND_MEMORY", "STAGE_LENT", "FINISH_WEIGHTS"]
    (memory,) = sharing.exported
    assert dispatcher.sent[1][1] == {"handle": memory.handle, "num_bytes": 2**21}
    assert dispatcher.values == {"a": list(range(40)), "b": [1, 1], "c": []}
    assert memory.is_freed


def test_the_memory_is_exported_once_for_all_buckets_of_an_update(dispatcher, gpu_push, sharing):
    big = torch.arange(2**19 + 5).float()
    gpu_push.start()
    for name in "ab":
        gpu_push.add([(name, big)])
        assert not sharing.exported[0].is_freed
    gpu_push.finish()
    assert methods(dispatcher).count("LEND_MEMORY") == 1
    assert methods(dispatcher).count("STAGE_LENT") == 4
    assert dispatcher.values == {name: big.tolist() for name in "ab"}
    assert sharing.log.count("free") == 1


def test_each_tensor_has_arrived_before_the_next_one_is_made(dispatcher, gpu_push, sharing):
    seen = []

    def weights():
        for name in "abc":
            seen.append(sharing.log.count("synchronize"))
            yield name, torch.ones(3)

    gpu_push.update(weights())
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([("a", torch.ones(2**19 + 1))], 2 * 2**21),
        ({"a": torch.ones(2**19 + 1)}, 2 * 2**21),
        ({"a": torch.ones(1)}, 2**21),
        (iter([("a", torch.ones(1))]), 3 * 2**21),
    ],
)
def test_the_memory_is_no_larger_than_the_tensors_or_the_model(dispatcher, sharing, weights, size):
    push = WeightPush(dispatcher, info(device_uuid=UUID, weight_bytes=3 * 2**21 - 5), sharing)
    push.update(weights)
    assert len(sharing.exported[0].tensor) == size


def test_other_tensors_go_through_host_memory_in_the_same_update(dispatcher, sharing, caplog):
    class TwoGpus(Sharing):
        def uuid(self, device):
            return {"cpu": "", "meta": "another"}[device.type]

    push = WeightPush(dispatcher, info(device_uuid=UUID), TwoGpus(dispatcher))
    push.update([("a", torch.ones(2)), ("b", np.ones(2, np.float32))])
    assert methods(dispatcher) == ["START_WEIGHTS", ["a", "b"], "FINISH_WEIGHTS"]
    assert caplog.records == []
    with caplog.at_level(logging.WARNING), pytest.raises(RequestError, match="on meta"):
        push.update([("a", torch.ones(2, device="meta"))] * 2)
    assert "they are on GPU another, the engine on fake-gpu" in caplog.text


REFUSALS = [RequestError("no"), CallError("no", "")]


@pytest.mark.parametrize("where", ["export", *REFUSALS])
def test_without_shared_memory_all_goes_through_host_memory(dispatcher, caplog, where):
    sharing = Sharing(dispatcher)
    push = WeightPush(dispatcher, info(device_uuid=UUID), sharing)
    if where == "export":
        sharing.refusal = "no"
    else:
        dispatcher.refuse[Method.LEND_MEMORY] = where
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            push.update([("a", torch.ones(2)), ("b", torch.ones(2))])
            assert methods(dispatcher)[-2:] == [["a", "b"], "FINISH_WEIGHTS"]
    assert len(caplog.records) == 1
    assert "through host memory: no" in caplog.text
    assert all(memory.is_freed for memory in sharing.exported)
    assert len(sharing.exported) == (0 if where == "export" else 2)  # once in each update
    sharing.refusal, dispatcher.refuse = "", {}
    push.update([("a", torch.ones(2))])
    assert methods(dispatcher)[-2:] == ["STAGE_LENT", "FINISH_WEIGHTS"]


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (Method.STAGE_LENT, RequestError("no")),
        (Method.CHECK_WEIGHTS, RequestError("no")),
        (Method.FINISH_WEIGHTS, RequestError("no")),
        (Method.FINISH_WEIGHTS, EngineDeadError("dead")),
    ],
)
def test_an_error_frees_the_memory_after_the_engine_has_answered(
    dispatcher, gpu_push, sharing, method, error
):
    dispatcher.refuse[method] = error
    gpu_push.start()
    with pytest.raises(type(error)):  # noqa: PT012
        gpu_push.add([("a", torch.ones(1))])
        gpu_push.finish()
    assert methods(dispatcher)[-1] in ("ABANDON_WEIGHTS", "FINISH_WEIGHTS")
    assert sharing.exported[0].is_freed


def test_memory_that_the_engine_may_still_read_is_not_freed(dispatcher, gpu_push, sharing):
    gpu_push.start()
    gpu_push.add([("a", torch.ones(1))])
    ends = (Method.FINISH_WEIGHTS, Method.ABANDON_WEIGHTS)
    dispatcher.refuse.update(dict.fromkeys(ends, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        gpu_push.finish()
    assert not sharing.exported[0].is_freed
    dispatcher.refuse.clear()
    gpu_push.start()  # the engine has ended the update before
    assert sharing.exported[0].is_freed
    gpu_push.add([("a", torch.ones(1))])
    assert methods(dispatcher).count("LEND_MEMORY") == 2


@pytest.mark.parametrize("method", [Method.LEND_MEMORY, Method.STAGE_LENT, Method.FINISH_WEIGHTS])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), TypeError("no JSON")])
def test_an_interrupted_call_ends_the_update_before_the_memory_is_freed(
    dispatcher, gpu_push, sharing, method, error
):
    dispatcher.refuse[method] = error
    call = dispatcher.call

    def check(method, argument=None):
        assert not any(memory.is_freed for memory in sharing.exported)
        return call(method, argument)

    dispatcher.call = check
    gpu_push.start()
    with pytest.raises(type(error)):  # noqa: PT012
        gpu_push.add([("a", torch.ones(1))])
        gpu_push.add([("a", torch.ones(1))])
        gpu_push.finish()
    assert methods(dispatcher)[-1] == "ABANDON_WEIGHTS"
    assert sharing.exported[0].is_freed
    assert not gpu_push.is_open


def test_closing_frees_the_memory_of_an_update_that_never_ended(gpu_push, sharing):
    gpu_push.start()
    gpu_push.add([("a", torch.ones(1))])
    gpu_push.close()
    gpu_push.close()
    assert sharing.log.count("free") == 1


def test_closing_while_weights_are_sent_leaves_the_memory_to_the_sender(
    dispatcher, gpu_push, sharing
):
    def weights():
        yield "a", torch.ones(1)
        gpu_push.close()  # by another thread
        assert not sharing.exported[0].is_freed
        dispatcher.refuse.update(dict.fromkeys(Method, ShmLLMError("this LLM is closed")))
        yield "b", torch.ones(1)

    with pytest.raises(ShmLLMError, match="closed"):
        gpu_push.update(weights())
    assert sharing.log.count("free") == 1


def test_a_tensor_on_the_gpu_that_cannot_be_sent_is_refused(dispatcher, gpu_push, sharing):
    for wrong in (torch.ones(2).to_sparse(), torch.ones([1] * 9)):
        with pytest.raises(RequestError, match="a: "):
            gpu_push.update([("b", torch.ones(2)), ("a", wrong)])
        assert sharing.exported[-1].is_freed


def test_gradients_and_strides_are_no_obstacle_on_a_gpu(dispatcher, gpu_push):
    base = torch.arange(6.0).reshape(2, 3)
    grown = base.clone().requires_grad_()
    gpu_push.update({"a": grown, "b": (grown * 2).t()})
    assert dispatcher.values == {"a": [0, 1, 2, 3, 4, 5], "b": [0, 6, 2, 8, 4, 10]}
