"""WeightUpdates: one at a time, completely or not at all, and their effect on requests."""

from __future__ import annotations

import logging

import pytest
import torch
from support.fake_model import FakeModel
from support.fake_sharing import FakeSharing
from support.fakes import FakeRunner, info

from shmllm.config.engine import EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.engine.core import EngineCore
from shmllm.errors import (
    CallOrderError,
    DeviceMemoryError,
    ProtocolMismatchError,
    RequestError,
)
from shmllm.outputs.columns import FinishReason
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

ME, OTHER = 3, 4
PROMPT = list(range(1, 13))


@pytest.fixture
def core():
    runner = FakeRunner(info())
    runner.model = FakeModel(
        {
            "a": (torch.zeros(2),),
            "b": (torch.zeros(2, 3), torch.zeros(3, 2).t()),
            "c": (torch.zeros(4, dtype=torch.float16),),
        }
    )
    config = EngineConfig(LoadConfig("nowhere"), scheduler=SchedulerConfig(8, 64))
    return EngineCore(config, runner)


@pytest.fixture
def weights(core):
    return core.weights


def stage(weights, client=ME, **tensors):
    for name, tensor in tensors.items():
        flat = tensor.contiguous().reshape(-1)
        memory = memoryview(bytearray(flat.view(torch.uint8).numpy().tobytes()))
        dtype = str(flat.dtype).removeprefix("torch.")
        weights.stage(client, [(name, dtype, tuple(tensor.shape), 0, len(flat), 0)], memory)


def test_weights_change_only_when_the_update_is_finished(core, weights):
    model, before = core.runner.model, core.runner.model.values()
    weights.start(ME)
    stage(weights, a=torch.ones(2), b=torch.arange(6.0).reshape(2, 3).double())
    weights.check(ME)
    assert model.values() == before
    assert weights.finish(ME) == ["a", "b"]
    assert model.values() == {"a": [1, 1], "b": [[0, 1, 2], [3, 4, 5]], "c": [0, 0, 0, 0]}
    assert torch.equal(*model.weights["b"])
    assert weights.version == 1
    assert weights.take_new_version() == 1


def test_a_tensor_can_arrive_in_pieces(core, weights):
    weights.start(ME)
    for begin in range(0, 6, 2):
        memory = torch.arange(begin, begin + 2, dtype=torch.float32).numpy().data
        weights.stage(ME, [("b", "float32", (2, 3), begin, 2, 0)], memory.cast("B"))
    weights.finish(ME)
    assert core.runner.model.values()["b"] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([("b", (2, 3), 0, 2)], "only a part of b"),
        ([("b", (2, 3), 2, 2)], "out of order"),
        ([("b", (2, 3), 0, 4), ("b", (2, 3), 4, 4)], "more values"),
    ],
)
def test_pieces_that_are_not_a_whole_tensor_are_refused(core, weights, pieces, message):
    weights.start(ME)
    for name, shape, begin, length in pieces:
        weights.stage(ME, [(name, "float32", shape, begin, length, 0)], memoryview(bytearray(64)))
    with pytest.raises(RequestError, match=message):
        weights.finish(ME)
    assert weights.version == 0


WRONG = {
    "x": torch.ones(1),
    "b": torch.ones(3, 2),
    "a": torch.ones(2, dtype=torch.int64),
    "c": torch.tensor([1, 2, float("inf"), 1.0]),
}


@pytest.mark.parametrize("method", ["check", "finish"])
def test_all_wrong_names_are_listed_and_the_old_weights_stay(core, weights, method):
    before = core.runner.model.values()
    weights.start(ME)
    stage(weights, **WRONG)
    with pytest.raises(RequestError) as caught:
        getattr(weights, method)(ME)
    for part in ("no weight 'x'", "b has shape [3, 2]", "a is torch.int64", "c has values"):
        assert part in str(caught.value)
    assert core.runner.model.values() == before
    assert weights.version == 0
    weights.start(ME)  # the update has ended


def test_a_long_list_is_cut(weights):
    weights.start(ME)
    stage(weights, **{f"x{i}": torch.ones(1) for i in range(30)})
    with pytest.raises(RequestError, match="and 22 more"):
        weights.finish(ME)


def test_values_that_overflow_in_the_models_dtype_are_not_finite(weights):
    weights.start(ME)
    stage(weights, c=torch.full((4,), 1e6))
    with pytest.raises(RequestError, match="c has values that are not finite"):
        weights.finish(ME)


def test_large_finite_values_are_accepted(core, weights):
    core.runner.model.weights["a"] = (torch.zeros(1000),)
    weights.start(ME)
    stage(weights, a=torch.full((1000,), 3e38))
    weights.finish(ME)
    assert core.runner.model.values()["a"][0] == pytest.approx(3e38)


def test_calls_out_of_order_are_runtime_errors(weights):
    for call in (weights.check, weights.finish):
        with pytest.raises(CallOrderError, match="start one first"):
            call(ME)
    weights.start(ME)
    with pytest.raises(CallOrderError, match="by this front end"):
        weights.start(ME)
    with pytest.raises(CallOrderError, match="by another front end"):
        weights.start(OTHER)
    with pytest.raises(CallOrderError):
        weights.finish(OTHER)
    weights.abandon(OTHER)
    weights.finish(ME)
    assert issubclass(CallOrderError, RuntimeError)


def test_an_abandoned_update_leaves_nothing_behind(core, weights):
    weights.start(ME)
    stage(weights, a=torch.ones(2))
    weights.abandon(ME)
    weights.start(OTHER)
    stage(weights, client=ME, a=torch.ones(2))  # too late, so it is ignored
    assert weights.finish(OTHER) == []
    assert core.runner.model.values()["a"] == [0, 0]


def test_an_update_must_contain_all_missing_weights_unless_it_is_partial(core, weights):
    core.runner.model.missing = {"a", "b"}
    weights.start(ME)
    stage(weights, a=torch.ones(2))
    with pytest.raises(RequestError, match="b is missing"):
        weights.finish(ME)
    weights.start(ME)
    stage(weights, a=torch.ones(2))
    assert weights.finish(ME, partial=True) == ["a"]
    assert core.runner.model.missing == {"b"}


def test_versions_count_up_or_are_set_by_the_caller(weights):
    def update(version=None):
        weights.start(ME)
        weights.finish(ME, version)
        return weights.version

    assert [update(), update(), update(10), update()] == [1, 2, 10, 11]
    assert update("step-5") == "step-5"
    assert type(update()) is int
    for wrong in (1.5, True, "x" * 300, 2**70, ["a"]):
        weights.start(ME)
        with pytest.raises(RequestError, match="a version is"):
            weights.finish(ME, wrong)


def test_a_tied_head_and_rotary_frequencies_are_ignored(weights):
    weights.start(ME)
    stage(weights, **{"lm_head.weight": torch.ones(3), "x.rotary_emb.inv_freq": torch.ones(1)})
    assert weights.finish(ME) == []


def run(core, number, max_tokens=4):
    """Run a request to its end. Returns the number of its cached tokens."""
    core.add(
        ME, EngineCoreRequest(number, PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens))
    )
    cached = None
    while core.scheduler.has_unfinished():
        for columns in core.step().values():
            for row, count in zip(columns.cached_rows, columns.cached_counts, strict=True):
                if columns.numbers[row] == number:
                    cached = count
    return cached


def update(weights, **options):
    weights.start(ME)
    stage(weights, a=torch.ones(2))
    weights.finish(ME, **options)


def test_an_update_empties_the_prefix_cache_by_default(core, weights):
    assert (run(core, 1), run(core, 2)) == (0, 8)
    update(weights, reset_prefix_cache=False)
    assert run(core, 3) == 8
    update(weights)
    assert run(core, 4) == 0


def test_running_requests_continue_or_end(core, weights):
    params = SamplingParams(temperature=0, max_tokens=30)
    core.add(ME, EngineCoreRequest(1, PROMPT, params))
    core.add(OTHER, EngineCoreRequest(1, PROMPT, params))
    core.step()
    update(weights)
    assert core.take_outputs() == []
    core.step()
    core.scheduler.check_integrity()
    update(weights, abort=True)
    ended = core.take_outputs()
    assert sorted(client for client, _ in ended) == [ME, OTHER]
    assert all(columns.finishes == [FinishReason.ABORT] for _, columns in ended)
    assert not core.scheduler.has_unfinished()


def test_a_refused_update_aborts_no_request(core, weights):
    core.add(ME, EngineCoreRequest(1, PROMPT, SamplingParams(temperature=0, max_tokens=30)))
    core.step()
    weights.start(ME)
    stage(weights, x=torch.ones(1))
    with pytest.raises(RequestError):
        weights.finish(ME, abort=True)
    assert core.scheduler.has_unfinished()


class OneProcessSharing(FakeSharing):
    """The fake GPU, of which this process is both ends."""

    def open(self, handle, num_bytes, device):
        if handle not in [memory.handle for memory in self.exported]:
            raise DeviceMemoryError(f"no handle: {handle}")
        return Mapping(self.exported[-1], self.log)


class Mapping:
    def __init__(self, memory, log):
        self.tensor = memory._shared
        self._log = log
        self._log.append("map")

    def close(self):
        self._log.append("unmap")


A = ["a", "float32", [2], 0, 2, 64]


@pytest.fixture
def lent(weights):
    """The weights, with an update and 128 lent bytes that contain a new "a"; and the log."""
    sharing = weights.sharing = OneProcessSharing()
    memory = sharing.export(128, None)
    memory.tensor[64:72].view(torch.float32).fill_(5)
    memory.arrive()
    weights.start(ME)
    weights.lend(ME, memory.handle, 128)
    return weights, sharing.log


def test_lent_memory_is_read_and_given_back_at_the_end(core, lent):
    weights, log = lent
    weights.stage_lent(ME, [A])
    assert core.runner.model.values()["a"] == [0, 0]
    assert log == ["export", "map", "synchronize"]
    assert weights.finish(ME) == ["a"]
    assert core.runner.model.values()["a"] == [5, 5]
    assert log[3:] == ["unmap"]


def test_weights_of_the_gpu_that_wait_in_host_memory_are_reported_once(lent, caplog):
    weights, _ = lent
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            weights.stage_lent(ME, [A])
        weights.finish(ME)
        weights.start(ME)
        weights.lend(ME, weights.sharing.exported[0].handle, 128)
        weights.stage_lent(ME, [A])
    (record,) = caplog.records
    assert "wait in the host's memory" in record.message


@pytest.mark.parametrize("end", ["abandon", "forget_client", "refused", "again"])
def test_every_end_gives_lent_memory_back(core, lent, end):
    weights, log = lent
    weights.stage_lent(ME, [A])
    if end == "abandon":
        weights.abandon(OTHER)
        assert "unmap" not in log
        weights.abandon(ME)
        weights.abandon(ME)
    elif end == "forget_client":
        core.forget_client(ME)
    elif end == "refused":
        weights.stage_lent(ME, [["x", *A[1:]]])
        with pytest.raises(RequestError):
            weights.check(ME)
    else:
        weights.lend(ME, weights.sharing.exported[0].handle, 128)
    assert log.count("unmap") == 1
    assert core.runner.model.values()["a"] == [0, 0]


def test_an_error_at_the_end_of_a_mapping_is_logged_and_ends_nothing(core, lent, caplog):
    weights, _ = lent

    def close():
        raise DeviceMemoryError("the driver is unwell")

    weights._lent.close = close
    with caplog.at_level(logging.WARNING):
        core.forget_client(ME)
    assert "the driver is unwell" in caplog.text
    weights.start(OTHER)


@pytest.mark.parametrize(
    "piece", [[*A[:5], 128], [*A[:5], 32], [*A[:4], 17, 64], ["a", "int", *A[2:]], A[:5], 3]
)
def test_wrong_pieces_of_lent_memory_are_refused_and_the_update_continues(core, lent, piece):
    weights, _ = lent
    with pytest.raises(ProtocolMismatchError):
        weights.stage_lent(ME, [piece])
    weights.stage_lent(ME, [A])
    assert weights.finish(ME) == ["a"]


def test_calls_about_lent_memory_need_an_update_and_memory(weights):
    weights.sharing = OneProcessSharing()
    for call in (lambda: weights.lend(ME, "x", 64), lambda: weights.stage_lent(ME, [])):
        with pytest.raises(CallOrderError, match="start one first"):
            call()
    weights.start(ME)
    with pytest.raises(CallOrderError, match="start one first"):
        weights.stage_lent(OTHER, [A])
    with pytest.raises(CallOrderError, match="no memory was lent"):
        weights.stage_lent(ME, [A])
    with pytest.raises(RequestError, match="no handle: x"):
        weights.lend(ME, "x", 64)
    for size in (0, -1, 2**40, 1.0, None, True):
        with pytest.raises(RequestError, match="a bucket has"):
            weights.lend(ME, "x", size)
    assert weights.finish(ME) == []


def test_an_engine_on_a_cpu_maps_no_memory(weights):
    weights.start(ME)
    with pytest.raises(RequestError, match="computes on cpu and shares no memory"):
        weights.lend(ME, "00" * 64, 64)
