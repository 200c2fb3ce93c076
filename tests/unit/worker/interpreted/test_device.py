"""The fake GPU behaves like a GPU, and raises errors where a GPU would silently compute garbage."""

from __future__ import annotations

import math
import random

import pytest
import torch
from conformance.device import DeviceConformance, no_waits, values
from support.fake_gpu import FakeGpu, eager, lazy

from shmllm_kernels.gpu.norm import rms_norm


class TestLazyDevice(DeviceConformance):
    pass


class TestEagerDevice(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _eager(self, gpu_device):
        gpu_device.progress = eager
        with torch.inference_mode():
            yield


def ones(*shape: int, device: FakeGpu) -> torch.Tensor:
    return torch.ones(shape, device=device.torch_device)


def test_nothing_is_done_before_the_host_waits(gpu_device):
    result, event = gpu_device.pinned((1,), torch.float32), gpu_device.event()
    x = ones(1, device=gpu_device)
    x.add_(1)
    result.copy_(x, non_blocking=True)
    event.record()
    assert not event.is_done()
    assert result.isnan().all()
    event.wait()
    assert result.tolist() == [2.0]


def test_progress_decides_how_many_operations_are_executed(gpu_device):
    event, progresses = gpu_device.event(), iter([0, 0, 1, 0, 2])
    gpu_device.progress = lambda queued: next(progresses)
    ones(1, device=gpu_device).add_(1)
    event.record()
    assert [event.is_done() for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.to(device=torch.device("cpu"), non_blocking=True),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.empty(1).copy_(x),
        lambda x: torch.empty(1).copy_(x, non_blocking=True),
    ],
)
def test_an_implicit_wait_of_the_host_is_refused(gpu_device, wait):
    x = ones(1, device=gpu_device)
    with no_waits(gpu_device), pytest.raises(RuntimeError, match="makes the host wait"):
        wait(x)
    assert not x.mul_(5).isnan().any()
    wait(x)
    assert not gpu_device.event().is_done() or x.tolist() == [5.0]


def test_a_device_tensor_has_no_numpy_array(gpu_device):
    x = ones(2, device=gpu_device)
    gpu_device.synchronize()
    with pytest.raises(TypeError, match="no numpy array"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1, 1]


def test_tensors_know_their_device(gpu_device):
    x, host = ones(2, device=gpu_device), torch.ones(2)
    on_device = host.to(x.device), torch.zeros_like(x), x[1:], x.new_zeros(1), x.half(), x + x
    assert {tensor.device for tensor in on_device} == {gpu_device.torch_device}
    gpu_device.synchronize()
    assert {host.device, x.cpu().device} == {torch.device("cpu")}
    assert x.to(gpu_device.torch_device) is x


def test_operations_on_host_and_device_tensors_are_refused(gpu_device):
    x, host = ones(2, device=gpu_device), torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        x + host
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(x[:, None], x[None], out=host[None].t() @ host[None])
    with pytest.raises(ValueError, match=r"_rms_norm.*cpu tensor"):
        rms_norm(x[None], x[None], host, 1e-6)
    number = torch.tensor(3.0)
    x.add_(number)  # its value is copied now
    number.fill_(100.0)
    gpu_device.synchronize()
    assert values(x) == [4.0, 4.0]
    assert (host + 1).tolist() == [2.0, 2.0]


def test_overwriting_pinned_memory_during_its_copy_changes_the_result(gpu_device):
    sent = gpu_device.pinned((1,), torch.float32)
    sent.fill_(1.0)
    x = ones(1, device=gpu_device)
    x.copy_(sent, non_blocking=True)
    sent.fill_(9.0)
    gpu_device.synchronize()
    assert values(x) == [9.0]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_memory_that_is_not_pinned_is_copied_at_once(gpu_device, non_blocking):
    sent = torch.ones(1)
    x = torch.empty(1, device=gpu_device.torch_device)
    x.copy_(sent, non_blocking=non_blocking)
    y = sent.to(gpu_device.torch_device, non_blocking=non_blocking)
    sent.fill_(9.0)
    gpu_device.synchronize()
    assert values(x) == values(y) == [1.0]


def test_a_capture_copies_from_pinned_memory_only(gpu_device):
    x, pinned = ones(1, device=gpu_device), gpu_device.pinned((1,), torch.float32)
    with gpu_device.capturing():
        gpu_device.begin_capture()
        x.copy_(pinned, non_blocking=True)
        graph = gpu_device.end_capture()
        pinned.fill_(5.0)
        graph.replay()
        gpu_device.synchronize()
        assert values(x) == [5.0]
        gpu_device.begin_capture()
        with pytest.raises(RuntimeError, match="not permitted while"):
            x.copy_(torch.ones(1))


def test_memory_is_nan_until_it_is_written(gpu_device):
    x = torch.empty(3, device=gpu_device.torch_device)
    assert (
        torch.empty(2, dtype=torch.int32, device=gpu_device.torch_device).cpu().tolist()
        == [-77] * 2
    )
    x[1] = 1.0
    gpu_device.synchronize()
    assert x.cpu().isnan().tolist() == [True, False, True]


def test_the_replay_of_a_graph_that_reads_a_freed_tensor_is_refused(gpu_device):
    held, y = [ones(2, device=gpu_device)], ones(2, device=gpu_device)
    (graph,) = DeviceConformance.capture(gpu_device, lambda: torch.mul(held[0], 2, out=y))
    graph.replay()
    held.clear()
    gpu_device.synchronize()  # queued operations keep their tensors alive
    with pytest.raises(AssertionError, match=r"1 tensor\(s\) that were freed"):
        graph.replay()


def test_memory_that_one_graph_freed_is_not_available_to_the_next(gpu_device):
    """The graphs share a memory pool: on a GPU other tensors may use the memory by then."""
    x, y = ones(2, device=gpu_device), ones(2, device=gpu_device)
    held = {}
    first, second = DeviceConformance.capture(
        gpu_device,
        lambda: held.update(middle=x * 2),
        lambda: y.copy_(held["middle"]),
    )
    first.replay()
    second.replay()
    gpu_device.synchronize()
    assert values(y) == [2.0, 2.0]
    held.clear()
    with pytest.raises(AssertionError, match="freed since"):
        second.replay()


@pytest.mark.parametrize("wait", ["item", "synchronize", "record", "replay"])
def test_a_wait_during_a_capture_is_refused(gpu_device, wait):
    x, event = ones(1, device=gpu_device), gpu_device.event()
    (graph,) = DeviceConformance.capture(gpu_device, lambda: x.add_(1))
    calls = {
        "item": x.item,
        "synchronize": gpu_device.synchronize,
        "record": event.record,
        "replay": graph.replay,
    }
    with gpu_device.capturing():
        gpu_device.begin_capture()
        with pytest.raises(RuntimeError, match="not permitted while"):
            calls[wait]()


def test_memory_that_a_graph_freed_is_garbage_in_its_next_replay(gpu_device):
    x, y = ones(2, device=gpu_device), ones(2, device=gpu_device)

    def read_what_was_not_written():
        dropped = torch.empty_like(x)
        torch.add(dropped, 0, out=y)
        dropped.fill_(5.0)

    (graph,) = DeviceConformance.capture(gpu_device, read_what_was_not_written)
    for _ in range(2):
        graph.replay()
        gpu_device.synchronize()
        assert y.cpu().isnan().all()


def test_launches_are_listed_and_a_replay_is_one_launch(gpu_device):
    x = ones(1, 8, device=gpu_device)

    def compute():
        x.add_(1)
        rms_norm(x, x, x[0], 1e-6)

    (graph,) = DeviceConformance.capture(gpu_device, compute)
    gpu_device.launched.clear()
    compute()
    assert gpu_device.launched == ["aten::add_", "_rms_norm"]
    gpu_device.launched.clear()
    graph.replay()
    assert gpu_device.launched == ["graph"]


def test_an_error_on_the_device_is_raised_when_the_host_waits(gpu_device):
    x = ones(2, device=gpu_device)
    torch.index_select(x, 0, torch.full((1,), 7, device=gpu_device.torch_device))
    with pytest.raises(IndexError) as caught:
        gpu_device.synchronize()
    assert caught.value.__notes__ == ["on the device, in aten::index_select"]


def some_work(device: FakeGpu, numbers: torch.Tensor) -> list[float]:
    """Run many kinds of operations on the device."""
    x = numbers.to(device.torch_device)
    views = x.view(4, 4).t(), x[::2], x.view(2, 8)
    table = torch.zeros(5, 4, device=device.torch_device)
    table[1:].copy_(views[0])
    where = torch.arange(4, device=device.torch_device)
    table.index_add_(0, where, views[0])
    top, places = torch.topk(views[2], 3)
    torch.topk(views[2], 3, out=(top, places))
    joined = torch.cat((top.flatten(), places.flatten().float(), views[1].contiguous()))
    first, _ = joined.sort(descending=True)
    pair = torch.where(first > 0, first.half().float(), -1.0).split(5)
    rms_norm(table, table, table[2].clone(), 1e-6)
    end = torch.cat((torch.softmax(pair[0], 0), pair[1], table.flatten(), x.cumsum(0)))
    device.synchronize()
    return values(end)


def test_results_do_not_depend_on_the_devices_progress():
    """Only programs that miss a wait have other results."""
    numbers, results = torch.randn(16), []
    chance = random.Random(3)
    progresses = [eager, lazy, lambda queued: chance.randrange(3), lambda queued: queued // 2]
    for index, progress in enumerate(progresses):
        with FakeGpu(progress) as device, torch.inference_mode(index % 2 == 1):
            results.append(some_work(device, numbers))
    assert results.count(results[0]) == len(progresses)
    assert not any(map(math.isnan, results[0]))


def test_nothing_is_intercepted_after_the_context():
    with FakeGpu(lazy):
        pass
    x = torch.ones(1, device="cpu:0")
    x.add_(1)
    assert x.tolist() == [2.0]
