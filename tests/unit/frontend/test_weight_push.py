"""WeightPush: the calls and buckets of an update, and the state after an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmllm.errors import CallOrderError, RequestError
from shmllm.frontend.weight_push import WeightPush
from shmllm.wire.messages import Method
from shmllm.wire.weight_bucket import pieces_of

SIZE = 128


class Lease:
    def __init__(self):
        self.buffer = memoryview(bytearray(SIZE))
        self.is_aborted = False

    def abort(self):
        self.is_aborted = True


class FakeDispatcher:
    """Records calls and buckets.

    Attributes:
        sent: the calls, as (method, argument), and the names in each bucket, in their order.
        leases: all buckets that were claimed.
        refuse: the exceptions that methods raise.
        values: the values of each weight that was sent.
    """

    def __init__(self):
        self.sent = []
        self.leases = []
        self.refuse = {}
        self.values = {}

    def call(self, method, argument=None):
        self.sent.append((method, argument))
        if method in self.refuse:
            raise self.refuse[method]
        return ["a"] if method is Method.FINISH_WEIGHTS else None

    def claim_bucket(self):
        self.leases.append(Lease())
        return self.leases[-1]

    def send_bucket(self, bucket, text):
        pieces = pieces_of(text, SIZE)
        self.sent.append([piece.name for piece in pieces])
        for piece in pieces:
            values = np.frombuffer(bucket.buffer, piece.dtype, piece.length, piece.offset)
            self.values.setdefault(piece.name, []).extend(values.tolist())


@pytest.fixture
def dispatcher():
    return FakeDispatcher()


@pytest.fixture
def push(dispatcher):
    return WeightPush(dispatcher)


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
