"""Remote procedure calls on the worker: methods, functions, permissions and effects."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fake_model import FakeModel
from support.fakes import FakeRunner, info

from shmllm.config.engine import EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.engine.core import EngineCore
from shmllm.engine.worker import METHODS, Worker
from shmllm.errors import CallError, ProtocolMismatchError, RequestError
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire import rpc
from shmllm.wire.rpc import RpcCall, decode_call, decode_result, encode_call, encode_result


@pytest.fixture
def core():
    runner = FakeRunner(info())
    runner.model = FakeModel({"a": (torch.zeros(2),), "b": (torch.zeros(3), torch.zeros(3))})
    config = EngineConfig(LoadConfig("nowhere"), scheduler=SchedulerConfig(8, 64))
    return EngineCore(config, runner)


@pytest.fixture
def worker(core):
    return Worker(core)


def call_through(call, allow=True):
    """Encode and decode a call, as between a front end and the engine."""
    tree, tensors = encode_call(call)
    tensors = [t.tobytes() if isinstance(t, np.ndarray) else t for t in tensors]
    return decode_call(json.loads(json.dumps(tree)), tensors, allow)


def result_through(result, call):
    """Encode and decode a result, as between the engine and a front end."""
    tree, tensors = encode_result(result, call)
    tensors = [t.tobytes() if isinstance(t, np.ndarray) else t for t in tensors]
    return decode_result(json.loads(json.dumps(tree)), tensors, call)


def own_function(worker, a, b=1):
    return HELPER * a + b


HELPER = 10


def test_a_function_is_pickled_with_its_module():
    arrived = call_through(RpcCall(own_function, (4,), {"b": 2}))
    assert arrived.method is not own_function
    assert arrived.method(None, *arrived.args, **arrived.kwargs) == 42


def test_partial_and_local_functions_can_be_sent():
    factor = 3
    for function in (lambda w, a: factor * a, functools.partial(own_function, b=0)):
        arrived = call_through(RpcCall(function, (2,)))
        assert arrived.method(None, *arrived.args) == function(None, 2)


def test_functions_are_refused_where_they_are_not_allowed():
    with pytest.raises(RequestError, match="allow_callables"):
        call_through(RpcCall(own_function), allow=False)
    assert call_through(RpcCall("check_health"), allow=False).method == "check_health"


def test_an_argument_that_cannot_be_pickled_is_a_request_error():
    import threading

    with pytest.raises(RequestError, match="cannot be pickled"):
        encode_call(RpcCall(own_function, (threading.Lock(),)))


def test_arguments_of_a_method_are_not_pickled():
    with pytest.raises(RequestError, match="cannot be sent"):
        encode_call(RpcCall("get_weight", (object(),)))


def test_only_the_result_of_a_function_may_be_a_pickle():
    result = SimpleNamespace(x=1)
    assert result_through(result, RpcCall(own_function)) == result
    with pytest.raises(TypeError):
        encode_result(result, RpcCall("list_weights"))
    tree, tensors = encode_result(result, RpcCall(own_function))
    with pytest.raises(ProtocolMismatchError, match="unexpected kind: 'pickle'"):
        decode_result(tree, [tensors[0].tobytes()], RpcCall("list_weights"))


def test_the_error_for_a_broken_pickle_has_the_cause(monkeypatch):
    with pytest.raises(CallError, match="cannot be loaded here"):
        decode_result({"pickle": {"$": "bytes", "at": 0}}, [b"nonsense"], RpcCall(own_function))
    with pytest.raises(RequestError, match="cannot be loaded in the engine"):
        decode_call({"function": {"$": "bytes", "at": 0}}, [b"nonsense"], True)


@pytest.mark.parametrize("tree", [None, [], {"value": 1, "pickle": 2}, {}])
def test_a_result_with_other_than_one_entry_is_refused(tree):
    with pytest.raises(ProtocolMismatchError):
        decode_result(tree, [], RpcCall(own_function))


def test_every_method_exists_and_has_a_docstring(worker):
    for name in METHODS:
        assert getattr(Worker, name).__doc__


def test_the_error_for_an_unknown_method_names_the_nearest_one(worker):
    with pytest.raises(RequestError, match="nearest is 'get_weight'"):
        worker.run(RpcCall("get_weights"))
    with pytest.raises(RequestError, match="no method '_method'"):
        worker.run(RpcCall("_method", ("run",)))


def test_a_function_gets_the_worker(worker):
    seen = worker.run(RpcCall(lambda w: (w.model, w.model_runner, w.rank, str(w.device))))
    assert seen == [(worker.model, worker.model_runner, 0, "cpu")]
    assert worker.get_model() is worker.model


def test_the_device_is_where_the_weights_are(worker):
    worker.model.weights = {"a": (torch.zeros(2, device="meta"),)}
    assert worker.device == torch.device("meta")


def test_exit_in_a_function_does_not_end_the_engine(worker):
    with pytest.raises(RuntimeError, match="exit"):
        worker.run(RpcCall(lambda w: exit(3)))


def test_weights_are_listed_and_copied(worker):
    assert worker.run(RpcCall("list_weights")) == {
        "a": ["float32", [2]],
        "b": ["float32", [3]],
    }
    copy = worker.run(RpcCall("get_weight", ("a",)))
    copy += 1
    assert not worker.model.weights["a"][0].any()
    with pytest.raises(RequestError, match="nearest name is a"):
        worker.run(RpcCall("get_weight", ("aa",)))


def load(worker, weights):
    return worker.run(RpcCall("load_weights", (weights,)))


def test_load_weights_writes_all_weights_or_none(worker):
    weights = [("a", torch.ones(2)), ("b", np.full(3, 2, np.float32))]
    with pytest.raises(RequestError, match="no weight 'c'"):
        load(worker, [*weights, ("c", torch.ones(1))])
    assert not worker.model.weights["a"][0].any()
    assert load(worker, weights) == ["a", "b"]
    assert worker.model.weights["a"][0].tolist() == [1, 1]
    assert [view.tolist() for view in worker.model.weights["b"]] == [[2, 2, 2]] * 2


def test_a_call_that_changes_weights_changes_their_version(core, worker):
    assert core.weights.take_new_version() is None
    load(worker, [("a", torch.ones(2))])
    assert core.weights.take_new_version() == 1
    assert core.weights.take_new_version() is None
    load(worker, [])
    assert core.weights.version == 1


def test_load_weights_empties_the_prefix_cache_even_if_requests_run(core, worker):
    params = SamplingParams(temperature=0, max_tokens=30)
    prompt = list(range(1, 13))

    def run_until_done(number):
        core.add(0, EngineCoreRequest(number, prompt, params))
        cached = None
        while core.scheduler.has_unfinished():
            for columns in core.step().values():
                for row, count in zip(columns.cached_rows, columns.cached_counts, strict=True):
                    if columns.numbers[row] == number:
                        cached = count
        return cached

    assert run_until_done(1) == 0
    assert run_until_done(2) == 8
    core.add(0, EngineCoreRequest(3, prompt, params))
    for _ in range(4):
        core.step()
    load(worker, [("a", torch.ones(2))])
    core.scheduler.check_integrity()
    # The running request continues and fills more blocks, none of which is cached.
    while core.scheduler.has_unfinished():
        core.step()
    assert run_until_done(4) == 0
    assert run_until_done(5) == 8


def test_a_call_that_changes_no_weights_keeps_the_prefix_cache(core, worker):
    core.add(
        0, EngineCoreRequest(1, list(range(1, 13)), SamplingParams(temperature=0, max_tokens=1))
    )
    core.step()
    worker.run(RpcCall("list_weights"))
    assert len(core._kv_cache.prefix_cache) == 3


def test_a_profile_replaces_the_runner_until_it_is_stopped(core, worker, tmp_path):
    runner = core.runner
    path = worker.run(RpcCall("start_profile", (str(tmp_path),), {"prefix": "p", "delay": 1}))
    core.add(0, EngineCoreRequest(1, [1, 2], SamplingParams(temperature=0, max_tokens=4)))
    assert core.runner is not runner
    with pytest.raises(RequestError, match="under way"):
        worker.run(RpcCall("start_profile", (str(tmp_path),)))
    while core.scheduler.has_unfinished():
        core.step()
    assert worker.run(RpcCall("stop_profile")) == path
    assert core.runner is runner
    assert len(runner.plans) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == [path.rsplit("/", 1)[1]]
    assert path.rsplit("/", 1)[1].startswith("p-")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": "a/b"}, "slashes"),
        ({"delay": -1}, "from 0"),
        ({"directory": f"{__file__}/below"}, "cannot write a profile to .*/below: "),
    ],
)
def test_a_profile_with_invalid_arguments_does_not_begin(core, worker, tmp_path, options, message):
    runner = core.runner
    with pytest.raises(RequestError, match=message):
        worker.run(RpcCall("start_profile", (), {"directory": str(tmp_path)} | options))
    assert core.runner is runner


def test_a_profile_makes_its_directory(worker, tmp_path):
    path = worker.run(RpcCall("start_profile", (str(tmp_path / "a" / "b"),)))
    assert path.startswith(f"{tmp_path}/a/b/")
    assert (tmp_path / "a" / "b").is_dir()


def test_stopping_a_profile_without_steps_is_an_error(core, worker, tmp_path):
    with pytest.raises(RequestError, match="no profile"):
        worker.run(RpcCall("stop_profile"))
    worker.run(RpcCall("start_profile", (str(tmp_path),), {"delay": 2}))
    with pytest.raises(RequestError, match="before it began"):
        worker.run(RpcCall("stop_profile"))
    assert list(tmp_path.iterdir()) == []


def test_installed_modules_are_pickled_by_reference():
    assert rpc._is_installed(json)
    assert rpc._is_installed(torch)
    assert rpc._is_installed(rpc)
