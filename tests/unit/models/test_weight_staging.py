"""StagedWeights: where a weight waits, and what another call may do meanwhile."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.fake_model import FakeModel

from shmllm.errors import RequestError
from shmllm.models import weight_staging
from shmllm.models.quantized import Int8Matrix
from shmllm.models.weight_staging import SPARE_BYTES, StagedWeights, free_bytes

NAMES = ["a", "b", "c"]
NEW = {
    "a": torch.arange(1.0, 7).reshape(2, 3),
    "b": torch.arange(2.0, 8).reshape(2, 3),
    "c": torch.arange(3.0, 9).reshape(2, 3),
}


@pytest.fixture
def model():
    """A model in which "a" is one plain tensor, "b" has two views, and "c" is not contiguous."""
    b_too = Int8Matrix.make((2, 3), torch.float32, lambda shape, kind: torch.zeros(shape).to(kind))
    a, b, c = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0), torch.full((3, 2), -1.0)
    return FakeModel({"a": (a,), "b": (b, b_too), "c": (c.t(),)})


def lose(model):
    """As a sleep at level 2, with all parts awake again."""
    model.weights_lost()
    for name in NAMES:
        model.weights[name][0].zero_()


def put(staged, name, values=None):
    flat = (NEW[name] if values is None else values).reshape(-1)
    for begin in range(0, len(flat), 4):
        staged.put(name, (2, 3), begin, flat[begin : begin + 4])


def assert_new(model, names=NAMES):
    for name in names:
        assert torch.equal(model.weights[name][0], NEW[name])


def test_weights_that_are_not_missing_change_at_the_end_only(model):
    before = model.values()
    staged = StagedWeights(model)
    for name in NAMES:
        put(staged, name)
    staged.check_complete(())
    assert model.values() == before
    assert staged.copy_into_place() == NAMES
    assert_new(model)
    torch.testing.assert_close(model.weights["b"][1].clone(), NEW["b"], atol=0.05, rtol=0)


def test_missing_weights_are_written_where_they_belong_if_they_are_one_plain_tensor(model):
    lose(model)
    staged = StagedWeights(model)
    for name in NAMES:
        put(staged, name)
    assert_new(model, ["a"])
    assert not model.weights["b"][0].any()
    assert not model.weights["c"][0].any()
    assert model.missing == set(NAMES)
    staged.check_complete(NAMES)
    assert staged.copy_into_place() == NAMES
    assert_new(model)
    assert not model.missing


def test_missing_weights_wait_for_the_end_if_other_ranks_get_them_too(model):
    model.followers = object()
    lose(model)
    staged = StagedWeights(model)
    put(staged, "a")
    assert not model.weights["a"][0].any()


def test_no_memory_is_taken_for_weights_that_are_written_where_they_belong(model, monkeypatch):
    monkeypatch.setattr(weight_staging, "HostMemory", None)
    lose(model)
    staged = StagedWeights(model)
    put(staged, "a")
    staged.check()


def test_an_update_that_fails_leaves_missing_weights_missing(model):
    lose(model)
    staged = StagedWeights(model)
    put(staged, "a", torch.full((2, 3), torch.nan))
    with pytest.raises(RequestError, match="a has values that are not finite"):
        staged.check_complete(["a"])
    assert model.missing == set(NAMES)
    again = StagedWeights(model)
    put(again, "a")
    again.check_complete(["a"])
    again.copy_into_place()
    assert_new(model, ["a"])


@pytest.mark.parametrize("when", ["between two pieces", "at the end"])
@pytest.mark.parametrize("what", ["written", "lost", "asleep"])
def test_another_call_that_touches_a_weight_that_is_being_written_fails_the_update(
    model, what, when
):
    lose(model)
    staged = StagedWeights(model)
    staged.put("a", (2, 3), 0, NEW["a"].reshape(-1)[:4])
    if when == "at the end":
        staged.put("a", (2, 3), 4, NEW["a"].reshape(-1)[4:])
    if what == "written":
        model.weights["a"][0].fill_(9)
        model.weights_changed(["a"])
    elif what == "lost":
        lose(model)
    else:
        model.is_asleep = True
    expected = model.weights["a"][0].clone()
    if when != "at the end":
        staged.put("a", (2, 3), 4, NEW["a"].reshape(-1)[4:])
    with pytest.raises(RequestError, match="a was written or put to sleep by another call"):
        staged.check_complete(())
    assert torch.equal(model.weights["a"][0], expected)


def test_a_sleeping_weight_is_not_written(model):
    lose(model)
    model.is_asleep = True
    staged = StagedWeights(model)
    put(staged, "a")
    assert not model.weights["a"][0].any()


GPU = SPARE_BYTES + 24


@pytest.mark.parametrize(("free", "on_gpu"), [(GPU, True), (GPU - 1, False), (0, False)])
def test_a_gpu_with_enough_memory_keeps_new_weights_itself(model, monkeypatch, free, on_gpu):
    if on_gpu:
        monkeypatch.setattr(weight_staging, "HostMemory", None)
    staged = StagedWeights(model, lambda device: free)
    for name in NAMES:
        put(staged, name)
    assert staged.uses_host is not on_gpu
    staged.check_complete(())
    staged.copy_into_place()
    assert_new(model)


def test_only_a_gpu_has_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 10))
    assert free_bytes(torch.device("cuda", 1)) == 5
    assert free_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize("free", [GPU, 0])
def test_the_memory_of_a_gpu_is_given_back_at_the_end(model, monkeypatch, free):
    emptied = []
    staged = StagedWeights(model, lambda device: free)
    put(staged, "a")
    place = weakref.ref(staged._places["a"])

    def empty_cache():
        assert place() is None
        emptied.append(True)

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    staged.close()
    assert emptied == [True] * bool(free)


def test_pieces_on_another_device_wait_in_host_memory(model):
    staged = StagedWeights(model, lambda device: GPU)
    assert staged._place("a", torch.device("meta")).device.type == "cpu"
    assert staged._host is not None


def test_a_gpu_that_is_full_after_all_leaves_them_to_host_memory(model, monkeypatch):
    def empty(*_, **__):
        raise torch.OutOfMemoryError("full")

    staged = StagedWeights(model, lambda device: GPU)
    monkeypatch.setattr(torch, "empty", empty)
    put(staged, "a")
    monkeypatch.undo()
    staged.check_complete(())
    staged.copy_into_place()
    assert_new(model, ["a"])


def test_host_memory_that_cannot_be_reserved_is_a_problem_of_the_update(model, monkeypatch):
    def mmap(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(weight_staging.mmap, "mmap", mmap)
    staged = StagedWeights(model)
    put(staged, "a")
    with pytest.raises(RequestError, match="no memory to stage 0 MiB of weights"):
        staged.check()


@pytest.mark.parametrize(("num_threads", "expected"), [(4, 3), (2, 1), (1, 1)])
def test_staging_leaves_a_core_to_the_front_end(num_threads, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with weight_staging.one_thread_less():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
